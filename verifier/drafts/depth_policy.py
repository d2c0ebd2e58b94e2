"""The speculation depth: how many drafts each sequence verifies in a step, from what was learned.

`step_cost.py` knows what rows cost, `acceptance.py` how likely drafts stand, and
`draft_allocation.py` weighs the one against the other. The limits of `draft_limits.py` stay
limits. Nothing here changes a token: the output does not depend on depths.

Knows token ids, lengths and durations; nothing of sequences, blocks or models.
"""

from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel, without_collections
from verifier.drafts.acceptance import CORRECTION_VARIANCE, Acceptance, learn, survival
from verifier.drafts.draft_allocation import allocate
from verifier.drafts.step_cost import NO_STEP, StepCost, StepShape, cost_of, fixed_cost, observe

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NO_TOKEN = -1
# Every so many steps with drafts, one verifies another number than the best; at first more often.
_PROBE_PERIOD_STEPS = 48
_FIRST_PROBE_PERIOD_STEPS = 8
# After so many steps without a draft, one verifies as many drafts as it has sequences, whatever a
# row is believed to cost. It takes twice the time of the others at most.
_NO_DRAFT_PERIOD_STEPS = 64
# Steps without drafts are alike: of so many, one is learned from.
_PLAIN_PERIOD_STEPS = 8
# The columns of a candidate's numbers; the last two are its sequence's correction.
_SOURCE, _MATCH, _PLACE, _LIMIT, _LOG_ODDS, _VARIANCE = range(6)
_NUM_COLUMNS = 6


class SequenceDepth:
    """What the policy knows of one sequence.

    Attributes:
        log_odds: the correction of its drafts' probabilities.
        variance: of the correction.
        num_declined: its last steps in a row that had drafts for it and verified none; those that
            verify drafts whether they pay or not do not count.
    """

    __slots__ = ("log_odds", "num_declined", "variance")

    def __init__(self) -> None:
        self.log_odds = 0.0
        self.variance = CORRECTION_VARIANCE
        self.num_declined = 0


class DraftCandidate(NamedTuple):
    """The drafts that one sequence could verify in a step. One is made per sequence and step.

    Attributes:
        match_length: of the hint; 0: unknown, or of a drafter's hint that it is resumed.
        place: in the hint, of the first draft.
        token_ids: in order; as many as the limits allow, at least one.
    """

    record: SequenceDepth
    source: int
    match_length: int
    place: int
    token_ids: list[int]

    @property
    def is_resumed(self) -> bool:
        return self.source > 0 and self.match_length == 0


class DepthOutcome(NamedTuple):
    """What a step brought beside its forecast.

    Attributes:
        expected_s: the forecast of `duration_s`. None: the policy did not learn from the step.
        plain_s: the estimate for plain decoding of the same tokens. None: the step computed
            prompts, too.
    """

    expected_s: float | None
    duration_s: float
    plain_s: float | None


class DepthPolicy:
    """Owned by the engine thread. `choose` before a step; `learn` after it, at latest after the
    next choice.
    """

    def __init__(self, *, max_rows: int, max_depth: int, row_tile: int) -> None:
        """Compiles the kernels, or loads them.

        Args:
            max_rows: most tokens of a step.
            max_depth: most drafts of a sequence.
            row_tile: how many rows the model's kernels compute at once.
        """
        self._cost = StepCost(max_rows=max_rows, row_tile=row_tile)
        self._acceptance = Acceptance()
        self._max_depth = max_depth
        self._num_plain_steps = 0
        # Steps with drafts, and when the next of them probes.
        self._num_steps = 0
        self._next_probe = _FIRST_PROBE_PERIOD_STEPS
        self._probes_more = False
        self._probe_factor = 1.0
        # In a row, the present one included.
        self._num_steps_without_draft = 0
        with without_collections():
            self._warm_up()

    def choose(
        self,
        candidates: SequenceOf[DraftCandidate],
        *,
        decode_shape: StepShape,
        shape: StepShape,
        max_drafts: int,
        draft_context: int,
    ) -> list[int]:
        """How many drafts each candidate verifies.

        Args:
            decode_shape: of the step without any of these drafts, and without prefill chunks.
            shape: with the chunks.
            max_drafts: the most of all.
            draft_context: how many tokens a draft attends to, about.
        """
        self._num_steps_without_draft += 1
        is_due = self._num_steps_without_draft >= _NO_DRAFT_PERIOD_STEPS
        if not candidates:
            return []
        self._count_step()
        depths = np.empty(len(candidates), dtype=np.int64)
        _choose(
            self._acceptance.trials, _numbers(candidates), self._max_depth, max_drafts,
            self._cost.knots, self._cost.coefficients, *decode_shape, *shape, draft_context,
            self._probe_factor, decode_shape.num_sequences if is_due else 0, depths,
        )  # fmt: skip
        chosen: list[int] = depths.tolist()
        has_drafts = any(chosen)
        if has_drafts:
            self._num_steps_without_draft = 0
        if not (is_due and has_drafts):
            for candidate, depth in zip(candidates, chosen, strict=True):
                record = candidate.record
                if depth:
                    record.num_declined = 0
                elif not candidate.is_resumed:
                    record.num_declined += 1
        return chosen

    def learn_plain(self, duration_s: float) -> DepthOutcome | None:
        """For a step that only decoded and had no candidates: its outcome, if the policy skips
        learning from it. It learns from one in `_PLAIN_PERIOD_STEPS`. None: call `learn`.
        """
        is_learned_from = self._num_plain_steps % _PLAIN_PERIOD_STEPS == 0
        self._num_plain_steps += 1
        if is_learned_from:
            return None
        return DepthOutcome(None, duration_s, duration_s)

    def learn(
        self,
        shape: StepShape,
        *,
        plain_shape: StepShape | None,
        duration_s: float,
        candidates: SequenceOf[DraftCandidate],
        num_draft_tokens: SequenceOf[int],
        entries: SequenceOf[int],
        num_accepted_tokens: IntArray,
        output_token_ids: IntArray,
    ) -> DepthOutcome:
        """Learns from a step.

        Args:
            shape: of the whole step.
            plain_shape: the same without any draft, if every sequence decoded.
            candidates: those of the step's `choose`.
            num_draft_tokens: of each of them, as verified.
            entries: each one's place in the next two.
            num_accepted_tokens: [B].
            output_token_ids: [B, K_max + 1], -1 behind the last.
        """
        # Made again: since the choice, another step may have been learned from.
        numbers = _numbers(candidates)
        flat: list[int] = []
        for (*_, token_ids), depth, entry in zip(
            candidates, num_draft_tokens, entries, strict=True
        ):
            flat += depth, entry, token_ids[depth] if depth < len(token_ids) else _NO_TOKEN
        outcomes = np.array(flat, dtype=np.int64).reshape(len(candidates), 3)
        expected_s, plain_s = _learn(
            self._acceptance.trials, numbers, outcomes, num_accepted_tokens, output_token_ids,
            *self._cost.state, *shape, *(plain_shape or NO_STEP), duration_s,
        )  # fmt: skip
        corrections = numbers[:, _LOG_ODDS:].tolist()
        for candidate, correction in zip(candidates, corrections, strict=True):
            candidate.record.log_odds, candidate.record.variance = correction
        return DepthOutcome(expected_s, duration_s, plain_s if plain_shape else None)

    def _count_step(self) -> None:
        """Sets the factor of the step's drafts: 1, or by turns a half and two where it probes."""
        self._num_steps += 1
        self._probe_factor = 1.0
        if self._num_steps == self._next_probe:
            self._probe_factor = 2.0 if self._probes_more else 0.5
            self._probes_more = not self._probes_more
            period = max(_FIRST_PROBE_PERIOD_STEPS, self._num_steps // 8)
            self._next_probe += min(period, _PROBE_PERIOD_STEPS)

    def _warm_up(self) -> None:
        """Runs every kernel once and forgets what it learned."""
        shape = StepShape(num_sequences=1, num_logits_rows=1, num_attended=1, num_rows=1)
        cost, acceptance = self._cost, self._acceptance
        self._cost, self._acceptance = deepcopy(cost), deepcopy(acceptance)
        candidate = DraftCandidate(
            SequenceDepth(), source=0, match_length=1, place=0, token_ids=[0]
        )
        [depth] = self.choose(
            [candidate],
            decode_shape=shape,
            shape=shape,
            max_drafts=1,
            draft_context=1,
        )
        self.learn(
            shape,
            plain_shape=shape,
            duration_s=1.0,
            candidates=[candidate],
            num_draft_tokens=[depth],
            entries=[0],
            num_accepted_tokens=np.zeros(1, dtype=np.int64),
            output_token_ids=np.zeros((1, 1), dtype=np.int64),
        )
        self._cost, self._acceptance = cost, acceptance
        self._num_steps = self._num_steps_without_draft = 0


def _numbers(candidates: SequenceOf[DraftCandidate]) -> FloatArray:
    """[N, _NUM_COLUMNS]."""
    # A flat list becomes an array in half the time of a nested one.
    flat: list[float] = []
    for record, source, match_length, place, token_ids in candidates:
        flat += (
            source, match_length, place, len(token_ids), record.log_odds, record.variance
        )  # fmt: skip
    return np.array(flat, dtype=np.float64).reshape(len(candidates), _NUM_COLUMNS)


@kernel
def _choose(
    trials: FloatArray,
    numbers: FloatArray,
    max_depth: int,
    max_drafts: int,
    knots: IntArray,
    coefficients: FloatArray,
    decode_sequences: int,
    decode_logits_rows: int,
    decode_attended: int,
    decode_rows: int,
    num_sequences: int,
    num_logits_rows: int,
    num_attended: int,
    num_rows: int,
    draft_context: int,
    probe_factor: float,
    num_instead_of_none: int,
    depths: IntArray,
) -> None:
    """Sets `depths`, [N]."""
    count = len(numbers)
    survivals = np.empty((count, max_depth))
    limits = np.empty(count, dtype=np.int64)
    for i in range(count):
        limits[i] = min(int(numbers[i, _LIMIT]), max_depth)
        survival(
            trials, int(numbers[i, _SOURCE]), int(numbers[i, _MATCH]), int(numbers[i, _PLACE]),
            numbers[i, _LOG_ODDS], survivals[i, : limits[i]],
        )  # fmt: skip
    cost = fixed_cost(coefficients, num_sequences, num_logits_rows, num_attended)
    with_one = fixed_cost(
        coefficients, num_sequences, num_logits_rows + 1, num_attended + draft_context
    )
    allocate(
        survivals, limits, max_drafts, knots, coefficients, decode_sequences, decode_rows,
        fixed_cost(coefficients, decode_sequences, decode_logits_rows, decode_attended), num_rows,
        cost, with_one - cost, probe_factor, num_instead_of_none, depths,
    )  # fmt: skip


@kernel
def _learn(
    trials: FloatArray,
    numbers: FloatArray,
    outcomes: IntArray,
    num_accepted_tokens: IntArray,
    output_token_ids: IntArray,
    knots: IntArray,
    coefficients: FloatArray,
    products: FloatArray,
    targets: FloatArray,
    scalars: FloatArray,
    num_sequences: int,
    num_logits_rows: int,
    num_attended: int,
    num_rows: int,
    plain_sequences: int,
    plain_logits_rows: int,
    plain_attended: int,
    plain_rows: int,
    duration_s: float,
) -> tuple[float, float]:
    """Learns acceptance, corrections and costs.

    Args:
        outcomes: of each candidate: its depth, its place in the next two, and its hint's token
            after the verified ones (-1: none).

    Returns:
        What `DepthOutcome` has but the step's duration.
    """
    for i in range(len(numbers)):
        depth, entry, next_token_id = outcomes[i]
        source, match_length = int(numbers[i, _SOURCE]), int(numbers[i, _MATCH])
        place = int(numbers[i, _PLACE])
        stood = num_accepted_tokens[entry]
        last_token_id = output_token_ids[entry, stood]
        if last_token_id < 0:
            # The row after the accepted drafts was not usable.
            is_failed = False
        elif stood < depth:
            is_failed = True
        else:
            # The step's own token is the hint's next one, or it is not.
            stood += last_token_id == next_token_id
            is_failed = next_token_id >= 0 and last_token_id != next_token_id
        numbers[i, _LOG_ODDS], numbers[i, _VARIANCE] = learn(
            trials, source, match_length, place, stood, is_failed, numbers[i, _LOG_ODDS],
            numbers[i, _VARIANCE],
        )  # fmt: skip
    expected_s = observe(
        knots, coefficients, products, targets, scalars, num_sequences, num_logits_rows,
        num_attended, num_rows, duration_s,
    )  # fmt: skip
    # A step gives each sequence one token beside its accepted drafts.
    num_steps = 1.0 + num_accepted_tokens.sum() / max(plain_sequences, 1)
    plain = cost_of(
        knots, coefficients, plain_sequences, plain_logits_rows, plain_attended, plain_rows
    )
    cost = cost_of(knots, coefficients, num_sequences, num_logits_rows, num_attended, num_rows)
    return expected_s, num_steps * plain / cost * duration_s
