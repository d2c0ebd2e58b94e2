"""How many drafts to verify: rules, and recorded answers computed side by side under one.

A rule sees what a verifier sees: each sequence's draft with the length of its match, what became of
the last step's drafts, and how long the step took.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from verifier.drafts.depth_policy import DepthPolicy, DraftCandidate, SequenceDepth
from verifier.drafts.step_cost import StepShape

#: Most drafts of a sequence.
FIXED = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
FloatArray = npt.NDArray[np.float64]

# What a sequence attends to, about: costs by context are not replayed.
_CONTEXT = 512
# Rows whose time `Averages` knows; between them, straight lines.
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_RATE, _MOST_CHANGE = 0.05, 0.2
_MOST_TRIALS = 512
# The standard deviation of a step's time, as a share.
_NOISE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinted:
    """An answer, and what was drafted before each of its tokens; of [N] tokens.

    Attributes:
        lengths: of the drafts.
        agreed: how many of a draft's first tokens came.
        match_lengths: of the drafts.
    """

    lengths: list[int]
    agreed: list[int]
    match_lengths: list[int]


class Draft(NamedTuple):
    """One sequence's draft in a step.

    Attributes:
        memory: what the rule keeps of the sequence.
        agreed: for `learn`, which may look one token beyond what was verified.
    """

    memory: Any
    match_length: int
    length: int
    agreed: int


class Rule(Protocol):
    """Chooses how many drafts each sequence of a step verifies."""

    def begin(self) -> Any:
        """The memory of a new sequence."""
        ...

    def choose(self, drafts: Sequence[Draft]) -> Sequence[int]: ...

    def learn(self, drafts: Sequence[Draft], depths: Sequence[int], ms: float) -> None: ...


@dataclass(slots=True, kw_only=True)
class Outcome:
    num_tokens: int = 0
    num_steps: int = 0
    ms: float = 0.0

    @property
    def tokens_per_ms(self) -> float:
        return self.num_tokens / self.ms


@dataclass(slots=True, kw_only=True)
class _Stream:
    hinted: Hinted
    memory: Any
    at: int = 1

    def draft(self) -> Draft:
        hinted, at = self.hinted, self.at
        return Draft(self.memory, hinted.match_lengths[at], hinted.lengths[at], hinted.agreed[at])


def run_streams(
    rule: Rule, hinted: Sequence[Hinted], num_streams: int, ms_by_rows: FloatArray
) -> Outcome:
    """Computes answers, so many at a time; the next begins as soon as one ends."""
    outcome = Outcome()
    noise = np.random.default_rng(1)
    waiting = deque(each for each in hinted if len(each.lengths) > 1)
    streams: list[_Stream] = []
    while waiting or streams:
        while waiting and len(streams) < num_streams:
            streams.append(_Stream(hinted=waiting.popleft(), memory=rule.begin()))
        drafts = [stream.draft() for stream in streams]
        depths = rule.choose(drafts)
        ms = float(ms_by_rows[len(streams) + sum(depths)])
        outcome.num_steps += 1
        outcome.ms += ms
        for stream, draft, depth in zip(streams, drafts, depths, strict=True):
            # The last token of an answer may be a draft: the step's own is behind it.
            num_tokens = min(min(draft.agreed, depth) + 1, len(stream.hinted.lengths) - stream.at)
            stream.at += num_tokens
            outcome.num_tokens += num_tokens
        rule.learn(drafts, depths, ms * math.exp(_NOISE * noise.standard_normal()))
        streams = [each for each in streams if each.at < len(each.hinted.lengths)]
    return outcome


class Fixed:
    """As many for each sequence, if its draft is so long."""

    def __init__(self, most: int) -> None:
        self._most = most

    def begin(self) -> None:
        return None

    def choose(self, drafts: Sequence[Draft]) -> list[int]:
        return [min(draft.length, self._most) for draft in drafts]

    def learn(self, drafts: Sequence[Draft], depths: Sequence[int], ms: float) -> None:
        pass


class Learned:
    """The verifier's own policy, which learns the costs, too."""

    def __init__(self, *, row_tile: int, max_depth: int) -> None:
        self._policy = DepthPolicy(max_rows=2048, max_depth=max_depth, row_tile=row_tile)
        self._candidates: list[tuple[int, DraftCandidate]] = []

    def begin(self) -> SequenceDepth:
        return SequenceDepth()

    def choose(self, drafts: Sequence[Draft]) -> list[int]:
        # Of its tokens, learning compares only the one behind the verified ones.
        self._candidates = [
            (i, DraftCandidate(draft.memory, 0, draft.match_length, 0, [0] * draft.length))
            for i, draft in enumerate(drafts)
            if draft.length
        ]
        shape = _shape(len(drafts), 0)
        chosen = self._policy.choose(
            [candidate for _, candidate in self._candidates],
            decode_shape=shape,
            shape=shape,
            max_drafts=1 << 20,
            draft_context=_CONTEXT,
        )
        depths = [0] * len(drafts)
        for (i, _), depth in zip(self._candidates, chosen, strict=True):
            depths[i] = depth
        return depths

    def learn(self, drafts: Sequence[Draft], depths: Sequence[int], ms: float) -> None:
        if not self._candidates and self._policy.learn_plain(ms / 1e3):
            return
        accepted = [min(draft.agreed, depth) for draft, depth in zip(drafts, depths, strict=True)]
        output_token_ids = np.full((len(drafts), max(depths) + 1), -1)
        for i, (draft, depth) in enumerate(zip(drafts, depths, strict=True)):
            output_token_ids[i, : accepted[i]] = 0
            output_token_ids[i, accepted[i]] = 0 if draft.agreed > depth else 1
        self._policy.learn(
            _shape(len(drafts), sum(depths)),
            plain_shape=_shape(len(drafts), 0),
            duration_s=ms / 1e3,
            candidates=[candidate for _, candidate in self._candidates],
            num_draft_tokens=[depths[i] for i, _ in self._candidates],
            entries=[i for i, _ in self._candidates],
            num_accepted_tokens=np.array(accepted),
            output_token_ids=output_token_ids,
        )


class Averages:
    """Running averages: of acceptance, by match length or of all, and of a step's time by rows.

    A draft stands with its class's share of accepted tokens, p, p², p³ and so on along the draft.
    The likeliest of all sequences are verified, as many as bring the most tokens per time.
    """

    def __init__(self, *, by_match: bool = True, ms_by_rows: FloatArray) -> None:
        """`ms_by_rows`: from which the times at `_KNOTS` are measured once, at the start."""
        self._by_match = by_match
        self._knots = np.array([rows for rows in _KNOTS if rows < len(ms_by_rows)])
        self._ms_at_knots = ms_by_rows[self._knots] * np.exp(
            _NOISE * np.random.default_rng(2).standard_normal(len(self._knots))
        )
        self._rows = np.arange(len(ms_by_rows))
        self._curve = self._ms_at_knots
        self._set_curve()
        # Of each class: trials, and how many were right. Longer matches are righter.
        self._trials = [[8.0, 8.0 * (2**i) / (2**i + 2)] for i in range(8)]

    def begin(self) -> None:
        return None

    def choose(self, drafts: Sequence[Draft]) -> list[int]:
        survivals = np.concatenate([self._survivals(draft) for draft in drafts])
        likeliest = np.argsort(-survivals, kind="stable")
        tokens = len(drafts) + np.concatenate([[0.0], survivals[likeliest].cumsum()])
        best = (tokens / self._curve[len(drafts) :][: len(tokens)]).argmax()
        owners = np.repeat(np.arange(len(drafts)), [draft.length for draft in drafts])
        # Survivals descend along a draft: those taken are its first ones.
        depths: list[int] = np.bincount(owners[likeliest[:best]], minlength=len(drafts)).tolist()
        return depths

    def learn(self, drafts: Sequence[Draft], depths: Sequence[int], ms: float) -> None:
        for draft, depth in zip(drafts, depths, strict=True):
            trials = self._of(draft)
            stood = min(draft.agreed, depth)
            trials[1] += min(draft.agreed, depth + 1)
            # The step's own token is a trial of the draft's next one.
            trials[0] += min(draft.length, stood + 1)
            if trials[0] > _MOST_TRIALS:
                trials[:] = trials[0] / 2, trials[1] / 2
        rows = len(drafts) + sum(depths)
        after = int(np.searchsorted(self._knots, rows, side="right"))
        if after < len(self._knots):
            before = after - 1
            share = (rows - self._knots[before]) / (self._knots[after] - self._knots[before])
            most = _MOST_CHANGE * self._curve[rows]
            error = _RATE * min(max(ms - self._curve[rows], -most), most)
            self._ms_at_knots[before] += (1 - share) * error
            self._ms_at_knots[after] += share * error
            self._set_curve()

    def _of(self, draft: Draft) -> list[float]:
        return self._trials[min(draft.match_length, 64).bit_length() if self._by_match else 0]

    def _survivals(self, draft: Draft) -> FloatArray:
        trials, right = self._of(draft)
        return np.full(draft.length, min(right / trials, 0.999)).cumprod()

    def _set_curve(self) -> None:
        self._ms_at_knots = np.maximum.accumulate(self._ms_at_knots)
        self._curve = np.interp(self._rows, self._knots, self._ms_at_knots)


def _shape(num_sequences: int, num_drafts: int) -> StepShape:
    num_rows = num_sequences + num_drafts
    return StepShape(
        num_sequences=num_sequences,
        num_logits_rows=num_rows,
        num_attended=num_rows * _CONTEXT,
        num_rows=num_rows,
    )


def rules(ms_by_rows: FloatArray, row_tile: int) -> dict[str, Callable[[], Rule]]:
    """Makes a rule that has seen nothing.

    Args:
        ms_by_rows: what rows cost, [rows].
        row_tile: how many the model's kernels compute at once.
    """
    return {
        "the verifier's": partial(Learned, row_tile=row_tile, max_depth=max(FIXED)),
        "averages by match": partial(Averages, ms_by_rows=ms_by_rows),
        "one average": partial(Averages, by_match=False, ms_by_rows=ms_by_rows),
        **{f"K {most}": partial(Fixed, most) for most in FIXED},
    }
