"""What a client asks a drafter for and what it hears, as plain values.

Owns the vocabulary of `tandem.drafter_client`. Fields mean what `protos/tandem/v1/drafter.proto`
says; None is the wire's "absent", so the server's default holds. Knows neither gRPC channels nor
protobuf (`tandem.draft_exchange` translates).
"""

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.generation import DraftSource, TandemError


class Keep(enum.StrEnum):
    """What of a released sequence's text goes to its pool."""

    NOTHING = "nothing"
    OUTPUT = "output"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramParams:
    """Which n-grams are matched, where, and which match wins."""

    min_ngram: int | None = None
    max_ngram: int | None = None
    overlap: Literal["disjoint", "allowed"] | None = None
    tie: Literal["earliest", "latest", "longest"] | None = None
    tokens_per_match: int | None = None
    algorithm: Literal["index", "kmp"] | None = None
    chained: bool = False
    pool_id: str = ""
    pool_min_ngram: int = 0
    # Feed the pool every so many tokens while the sequence grows; 0: when it is released only.
    pool_feed_tokens: int = 0
    pool_keep: Literal["output", "all"] | None = None


class DraftedSequence:
    """One growing sequence of tokens; made by a client's `open`, belongs to that client.

    Attributes:
        sequence_id: 128 random bits; the drafter's name for it.
        params: how it is drafted for.
        prompt_length: how many of its tokens are prompt; None until the first history is given,
            which then counts as the prompt.
        max_length: the length that no draft passes; 0: none.
        num_sent: tokens that the drafter took, as far as we heard; the client's own.
        is_released: whether it may not be used any more.
    """

    __slots__ = ("is_released", "max_length", "num_sent", "params", "prompt_length", "sequence_id")

    def __init__(self, *, params: NgramParams, prompt_length: int | None, max_length: int) -> None:
        self.sequence_id = secrets.token_hex(16)
        self.params = params
        self.prompt_length = prompt_length
        self.max_length = max_length
        self.num_sent = 0
        self.is_released = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftQuery:
    """What may follow this history of this sequence?"""

    sequence: DraftedSequence
    # All of its tokens; only a list's or an array's last ones are looked at.
    token_ids: Sequence[int]
    # Most tokens wanted; 0 only tells the drafter about the history.
    max_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What may come next; empty where nothing is known. A hint: check it against the model."""

    token_ids: tuple[int, ...] = ()
    # How many tokens before the draft agree with those before the place it was copied from.
    matched_ngram_length: int = 0
    source: DraftSource | None = None
    # It is empty because the history is still being indexed: ask again later.
    is_indexing: bool = False
    # Why the drafter does not take this sequence: wrong params, or it is longer than it keeps.
    error: TandemError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """How full a drafter is."""

    # A new one means that all histories are gone.
    instance_id: str
    num_sequences: int
    max_sequences: int
    history_bytes: int
    max_history_bytes: int
    pool_bytes: int
