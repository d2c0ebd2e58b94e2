"""What one message to a drafter holds, and what its answer holds.

Owns these types and the wire's limits on them. Knows no gRPC and no sequence.
"""

import enum
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from tandem.values import DraftSource, Keep

#: The wire's limits (drafter.proto).
MAX_DELTA_TOKENS = 8_192
MAX_DELTAS = 4_096
MAX_REQUEST_BYTES = 1 << 20
#: A token id, at most.
TOKEN_BYTES = 5


class DrafterProtocolError(Exception):
    """A drafter's answer does not fit its batch."""


class ProposalStatus(enum.IntEnum):
    """How a drafter answered; the wire's numbers. Unknown ones are read as UNSPECIFIED."""

    UNSPECIFIED = 0
    OK = 1
    NO_MATCH = 2
    OUT_OF_SYNC = 3
    INVALID = 4
    INDEXING = 5


class Proposal(NamedTuple):
    """The answer to one delta. `drafter.proto` documents the fields."""

    sequence_id: str
    base_length: int
    token_ids: list[int]
    matched_ngram_length: int
    source: DraftSource | None
    status: ProposalStatus
    known_length: int
    message: str


class Delta(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        max_draft_tokens: 0: the tokens are appended, and no proposal is made.
        encoded_params: None if the drafter has the sequence.
        trace_parent: the span that the history is part of; "": none, or the drafter has it.
    """

    sequence_id: str
    base_length: int
    token_ids: SequenceOf[int]
    prompt_length: int
    max_draft_tokens: int
    max_length: int
    encoded_params: bytes | None
    trace_parent: str = ""


class Release(NamedTuple):
    """A sequence that its drafter may forget.

    Attributes:
        length: where the text ends, if the drafter was sent more; else 0.
    """

    sequence_id: str
    keep: Keep
    length: int


class DeltaBatch(NamedTuple):
    """One message to the drafter.

    Attributes:
        max_answer_bytes: no longer answer is the answer to this message.
    """

    batch_id: int
    deltas: SequenceOf[Delta]
    releases: SequenceOf[Release]
    max_answer_bytes: int
