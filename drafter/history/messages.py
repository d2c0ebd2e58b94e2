"""What the drafter is told about a sequence, and what it answers: the wire's messages as plain
types. How they look on the wire is known to `wire.py` alone.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.ngram.params import DEFAULT_PARAMS, NgramParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """New tokens of one sequence, and how much draft to answer with."""

    sequence_id: str
    base_length: int
    """Tokens of the sequence before `token_ids[0]`. 0 creates the sequence, or re-creates it."""
    token_ids: npt.NDArray[np.uint32]
    prompt_length: int = 0
    """How many of the sequence's tokens are prompt; counts at creation only."""
    max_draft_tokens: int = 0
    """Most tokens wanted in the proposal; 0 appends only."""
    max_length: int = 0
    """The length that no draft passes; 0: none."""
    params: NgramParams = DEFAULT_PARAMS
    """Counts at creation only."""


class Source(Enum):
    """Where a draft was copied from."""

    SEQUENCE = "sequence"
    POOL = "pool"


class ProposalStatus(Enum):
    """What became of a delta."""

    OK = "ok"
    """Appended; the draft is empty only if none was asked for."""
    NO_MATCH = "no_match"
    """Appended; no n-gram matched, or there is no room for a draft."""
    INDEXING = "indexing"
    """Appended; much is still to be indexed, and it is not known yet whether there is a draft."""
    OUT_OF_SYNC = "out_of_sync"
    """Not appended; send again from `known_length`."""
    INVALID = "invalid"
    """Not appended; `message` names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The answer to one delta."""

    sequence_id: str
    status: ProposalStatus
    base_length: int = 0
    """The context length that the draft continues: the known tokens after the delta."""
    token_ids: list[int] | None = None
    """The draft; None: nothing was proposed."""
    matched_ngram_length: int = 0
    source: Source = Source.SEQUENCE
    """Where the draft was copied from, if there is one."""
    known_length: int = 0
    message: str = ""
