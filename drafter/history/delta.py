"""A delta: a client's message about one sequence. Its wire format is known to `drafter.batch`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.ngram.params import DEFAULT_PARAMS, NgramParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDelta:
    """New tokens of one sequence, and how long its draft may be."""

    sequence_id: str
    base_length: int
    """Tokens of the sequence before `token_ids[0]`. 0 creates the sequence, or re-creates it."""
    token_ids: npt.NDArray[np.uint32]
    prompt_length: int = 0
    """How many of the sequence's tokens are prompt; used at creation only."""
    max_draft_tokens: int = 0
    """Most tokens of the draft; 0 appends only."""
    max_length: int = 0
    """No draft makes the sequence longer than this; 0: no limit."""
    params: NgramParams = DEFAULT_PARAMS
    """Used at creation only."""
