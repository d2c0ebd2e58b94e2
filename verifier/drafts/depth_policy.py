"""The speculation depth: how many drafts each sequence verifies in a step, from what was learned.

`step_cost.py` knows what rows cost, `acceptance.py` how likely drafts stand, and
`draft_allocation.py` weighs the one against the other. The limits of `draft_limits.py` stay
limits. Nothing here changes a token: the output does not depend on depths.

Knows token ids, lengths and durations; nothing of sequences, blocks or models.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel, without_collections
from verifier.drafts.acceptance import learn, new_trials, survival
from verifier.drafts.draft_allocation import allocate
from verifier.drafts.step_cost import cost_of, costs_from, new_curve, new_pace, observe

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NO_TOKEN = -1
# The columns of a candidate's numbers.
_SOURCE, _AGREED, _LIMIT, _LOG_ODDS = range(4)


class SequenceDepth:
    """What the policy knows of one sequence.

    Attributes:
        log_odds: the correction of its drafts' probabilities.
        num_declined: its last steps in a row that had drafts for it and verified none.
    """

    __slots__ = ("log_odds", "num_declined")

    def __init__(self) -> None:
        self.log_odds = 0.0
        self.num_declined = 0


class DraftCandidate(NamedTuple):
    """The drafts that one sequence could verify in a step. One is made per sequence and step.

    Attributes:
        num_agreed: tokens before the first draft that are known to match.
        is_resumed: whether they are of a contradicted hint.
        token_ids: in order; as many as the limits allow, at least one.
    """

    record: SequenceDepth
    source: int
    num_agreed: int
    is_resumed: bool
    token_ids: list[int]


class DepthOutcome(NamedTuple):
    """What a step brought beside its forecast.

    Attributes:
        expected_s: the forecast of `duration_s`.
        plain_s: the estimate for plain decoding of the same tokens. None: the step computed
            prompts, too.
    """

    expected_s: float
    duration_s: float
    plain_s: float | None


class DepthPolicy:
    """Owned by the engine thread. `choose` before a step; `learn` after it, at latest after the
    next choice.
    """

    def __init__(self, *, max_rows: int, max_depth: int) -> None:
        """Compiles the kernels, or loads them.

        Args:
            max_rows: most tokens of a step.
            max_depth: most drafts of a sequence.
        """
        self._max_depth = max_depth
        # Drafts may take the place of a prompt's rows.
        self._curve, self._pace = new_curve(2 * max_rows), new_pace()
        self._trials = new_trials()
        with without_collections():
            self._warm_up()

    def choose(
        self,
        candidates: SequenceOf[DraftCandidate],
        *,
        num_sequences: int,
        num_rows: int,
        num_chunk_rows: int,
        max_drafts: int,
    ) -> list[int]:
        """How many drafts each candidate verifies.

        Args:
            num_sequences: that decode.
            num_rows: of the step without any of these drafts, and without prefill chunks.
            num_chunk_rows: of the chunks.
            max_drafts: the most of all.
        """
        if not candidates:
            return []
        depths = np.empty(len(candidates), dtype=np.int64)
        _choose(
            self._trials, self._curve, self._pace, _numbers(candidates), self._max_depth,
            max_drafts, num_sequences, num_rows, num_chunk_rows, depths,
        )  # fmt: skip
        chosen: list[int] = depths.tolist()
        for candidate, depth in zip(candidates, chosen, strict=True):
            if depth:
                candidate.record.num_declined = 0
            elif not candidate.is_resumed:
                candidate.record.num_declined += 1
        return chosen

    def learn(
        self,
        *,
        num_rows: int,
        num_plain_rows: int,
        duration_s: float,
        candidates: SequenceOf[DraftCandidate],
        num_draft_tokens: SequenceOf[int],
        entries: SequenceOf[int],
        num_accepted_tokens: IntArray,
        output_token_ids: IntArray,
    ) -> DepthOutcome:
        """Learns from a step.

        Args:
            num_rows: of the whole step.
            num_plain_rows: of the same without any draft, if every sequence decoded; else 0.
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
            self._trials, self._curve, self._pace, numbers, outcomes, num_accepted_tokens,
            output_token_ids, num_rows, num_plain_rows, duration_s,
        )  # fmt: skip
        for candidate, log_odds in zip(candidates, numbers[:, _LOG_ODDS].tolist(), strict=True):
            candidate.record.log_odds = log_odds
        return DepthOutcome(expected_s, duration_s, plain_s if num_plain_rows else None)

    def _warm_up(self) -> None:
        """Runs every kernel once; what they learn is dropped."""
        state = self._trials.copy(), self._curve.copy(), self._pace.copy()
        numbers = _numbers([DraftCandidate(SequenceDepth(), 0, 1, False, [0])])
        tokens = np.zeros((1, 3), dtype=np.int64)
        _choose(*state, numbers, 1, 1, 1, 1, 0, np.empty(1, dtype=np.int64))
        _learn(*state, numbers, tokens, np.zeros(1, dtype=np.int64), tokens, 1, 1, 1.0)


def _numbers(candidates: SequenceOf[DraftCandidate]) -> FloatArray:
    """[N, 4]."""
    # A flat list becomes an array in half the time of a nested one.
    flat: list[float] = []
    for record, source, num_agreed, _, token_ids in candidates:
        flat += source, num_agreed, len(token_ids), record.log_odds
    return np.array(flat, dtype=np.float64).reshape(len(candidates), 4)


@kernel
def _choose(
    trials: FloatArray,
    curve: FloatArray,
    pace: FloatArray,
    numbers: FloatArray,
    max_depth: int,
    max_drafts: int,
    num_sequences: int,
    num_rows: int,
    num_chunk_rows: int,
    depths: IntArray,
) -> None:
    """Sets `depths`, [N]."""
    survivals = np.zeros((len(numbers), max_depth))
    most = 0
    for i in range(len(numbers)):
        limit = min(int(numbers[i, _LIMIT]), max_depth)
        most += limit
        survival(
            trials, int(numbers[i, _SOURCE]), int(numbers[i, _AGREED]), numbers[i, _LOG_ODDS],
            survivals[i, :limit],
        )  # fmt: skip
    most = min(most, max_drafts)
    decode_costs, costs = np.empty(most + 1), np.empty(most + 1)
    costs_from(curve, pace, num_rows, decode_costs)
    costs_from(curve, pace, num_rows + num_chunk_rows, costs)
    allocate(survivals, num_sequences, decode_costs, costs, depths)


@kernel
def _learn(
    trials: FloatArray,
    curve: FloatArray,
    pace: FloatArray,
    numbers: FloatArray,
    outcomes: IntArray,
    num_accepted_tokens: IntArray,
    output_token_ids: IntArray,
    num_rows: int,
    num_plain_rows: int,
    duration_s: float,
) -> tuple[float, float]:
    """Learns acceptance, which changes `numbers`, and costs.

    Args:
        outcomes: of each candidate: its depth, its place in the next two, and its hint's token
            after the verified ones (-1: none).

    Returns:
        What `DepthOutcome` has but the step's duration.
    """
    for i in range(len(numbers)):
        depth, entry, next_token_id = outcomes[i]
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
        numbers[i, _LOG_ODDS] = learn(
            trials, int(numbers[i, _SOURCE]), int(numbers[i, _AGREED]), stood, is_failed,
            numbers[i, _LOG_ODDS],
        )  # fmt: skip
    expected_s = observe(curve, pace, num_rows, duration_s, num_plain_rows > 0)
    # A step gives each sequence one token beside its accepted drafts.
    num_steps = 1.0 + num_accepted_tokens.sum() / max(num_plain_rows, 1)
    plain_s = duration_s * cost_of(curve, num_plain_rows) / cost_of(curve, num_rows)
    return expected_s, num_steps * plain_s
