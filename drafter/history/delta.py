"""What a client says of one sequence; how that looks on the wire is known to `drafter.batch`."""

from dataclasses import dataclass

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
