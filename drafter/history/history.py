"""The known tokens of one sequence, and the delta that brings it new ones.

Does not know why tokens are appended or refused, nor that there are other sequences (`store.py`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drafter.ngram.params import DEFAULT_PARAMS, NgramParams
from drafter.ngram.text import IndexedText
from drafter.pool_index.link import NEVER, link_to_pool, set_pool_use


class SequenceDelta(NamedTuple):
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
    trace_parent: str = ""
    """The span that the sequence is part of; used at creation only."""


class History(IndexedText):
    """The known tokens of one sequence; owned by the event loop, through the store.

    Attributes:
        sequence_id: of the sequence.
        prompt_length: how many of its tokens are prompt, once the prompt has arrived whole.
        last_used_s: when it was last appended to; set by the store.
        is_stored: whether the store still holds it; set by the store.
    """

    __slots__ = ("is_stored", "last_used_s", "prompt_length", "sequence_id")

    def __init__(
        self, *, params: NgramParams, prompt_length: int, max_tokens: int, sequence_id: str = ""
    ) -> None:
        super().__init__(params=params, max_tokens=max_tokens)
        self.sequence_id = sequence_id
        self.prompt_length = prompt_length
        self.last_used_s = 0.0
        self.is_stored = False
        if params.pool_id:
            link_to_pool(self.address, NEVER, 0)
            set_pool_use(self.address, params.pool_min_ngram)
