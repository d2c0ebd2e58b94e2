"""Queries to a drafter and its answers, as plain values.

Owns the vocabulary of `drafter_client.py`. Fields mean what `protos/tandem/v1/drafter.proto`
says. None leaves a field absent, so the server's default holds. Knows neither gRPC channels nor
protobuf (`draft_exchange.py` translates).
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.generation import TandemError
from tandem.values import DraftSource, NgramParams


class DraftedSequence:
    """One growing sequence of tokens; made by a client's `open`, belongs to that client.

    Attributes:
        sequence_id: 128 random bits; the drafter's name for it.
        params: how drafts are made for it.
        prompt_length: how many of its tokens are prompt; None until the first history is given,
            which then counts as the prompt.
        max_length: the length that no draft exceeds; 0 is none.
        num_sent: tokens that the drafter has confirmed; written by the client only.
        is_released: whether it can no longer be used.
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
    """Asks for a draft that continues the history of one sequence."""

    sequence: DraftedSequence
    token_ids: Sequence[int]
    """The whole history. Only its last tokens are read from a list or an array."""
    max_draft_tokens: int
    """Maximum length of the draft; 0 only sends the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens that may come next; empty if nothing matched. A hint: check it against the model."""

    token_ids: tuple[int, ...] = ()
    matched_ngram_length: int = 0
    """How many tokens before the draft equal those before the place that it was copied from."""
    source: DraftSource | None = None
    is_indexing: bool = False
    """The draft is empty because the history is still being indexed: ask again later."""
    error: TandemError | None = None
    """Why the drafter refuses the sequence: wrong params, or longer than the drafter keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """How full a drafter is."""

    instance_id: str
    """Changes when the drafter restarts and all histories are lost."""
    num_sequences: int
    max_sequences: int
    history_bytes: int
    max_history_bytes: int
    pool_bytes: int
