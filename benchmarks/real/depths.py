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

#: Most drafts of a sequence.
FIXED = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
FloatArray = npt.NDArray[np.float64]

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

    def __init__(self, *, max_depth: int) -> None:
        self._policy = DepthPolicy(max_rows=2048, max_depth=max_depth)
        self._candidates: list[tuple[int, DraftCandidate]] = []

    def begin(self) -> SequenceDepth:
        return SequenceDepth()

    def choose(self, drafts: Sequence[Draft]) -> list[int]:
        # Of its tokens, learning compares only the one behind the verified ones.
        self._candidates = [
            (i, DraftCandidate(draft.memory, 0, draft.match_length, False, [0] * draft.length))
            for i, draft in enumerate(drafts)
            if draft.length
        ]
        chosen = self._policy.choose(
            [candidate for _, candidate in self._candidates],
            num_sequences=len(drafts),
            num_rows=len(drafts),
            num_chunk_rows=0,
            max_drafts=1 << 20,
        )
        depths = [0] * len(drafts)
        for (i, _), depth in zip(self._candidates, chosen, strict=True):
            depths[i] = depth
        return depths

    def learn(self, drafts: Sequence[Draft], depths: Sequence[int], ms: float) -> None:
        accepted = [min(draft.agreed, depth) for draft, depth in zip(drafts, depths, strict=True)]
        output_token_ids = np.full((len(drafts), max(depths) + 1), -1)
        for i, (draft, depth) in enumerate(zip(drafts, depths, strict=True)):
            output_token_ids[i, : accepted[i]] = 0
            output_token_ids[i, accepted[i]] = 0 if draft.agreed > depth else 1
        self._policy.learn(
            num_rows=len(drafts) + sum(depths),
            num_plain_rows=len(drafts),
            duration_s=ms / 1e3,
            candidates=[candidate for _, candidate in self._candidates],
            num_draft_tokens=[depths[i] for i, _ in self._candidates],
            entries=[i for i, _ in self._candidates],
            num_accepted_tokens=np.array(accepted),
            output_token_ids=output_token_ids,
        )


def rules() -> dict[str, Callable[[], Rule]]:
    """Makes a rule that has seen nothing."""
    return {
        "the verifier's": partial(Learned, max_depth=max(FIXED)),
        **{f"K {most}": partial(Fixed, most) for most in FIXED},
    }
