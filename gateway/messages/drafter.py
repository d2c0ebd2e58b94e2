"""Messages to and from a drafter: deltas and releases; proposals.

Owns the gateway's own form of them. `base_length` is always the number of tokens of the sequence
before the first one carried.

A delta and a proposal per sequence and step are made between a step's end and its next hint, so
they are named tuples: a frozen dataclass takes three times as long to make.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from gateway.messages.request import Keep, NgramParams
from gateway.messages.verifier import Hint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewHistory:
    """How a drafter makes a sequence's history."""

    prompt_length: int
    ngram: NgramParams


class Delta(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        token_ids: at most `MAX_DELTA_TOKENS` of `peers/draft_feed.py`.
        max_draft_tokens: 0: the tokens are appended, and no proposal is made.
        new_history: None if the drafter has the sequence.
    """

    sequence_id: str
    base_length: int
    token_ids: list[int]
    max_draft_tokens: int
    max_length: int
    new_history: NewHistory | None


class Release(NamedTuple):
    """A sequence that its drafter may forget.

    Attributes:
        keep: which part of its text its pool keeps.
        length: where the text ends, if the drafter was sent more; else 0.
    """

    sequence_id: str
    keep: Keep = Keep.NOTHING
    length: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """One message to a drafter."""

    batch_id: int
    deltas: Sequence[Delta]
    releases: Sequence[Release]


class ProposalStatus(enum.IntEnum):
    """How a drafter answered; the wire's numbers. Unknown ones are read as UNSPECIFIED."""

    UNSPECIFIED = 0
    OK = 1
    NO_MATCH = 2
    OUT_OF_SYNC = 3
    INVALID = 4
    INDEXING = 5


class Proposal(NamedTuple):
    """The answer to one delta."""

    status: ProposalStatus
    hint: Hint
    known_length: int
    message: str
