"""The known tokens of one sequence, and the delta that brings it new ones.

Does not know why tokens are appended or refused, nor that there are other sequences (`store.py`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter.ngram.params import DEFAULT_PARAMS, Keep, NgramParams
from drafter.ngram.text import IndexedText
from drafter.pool_index.link import NEVER, link_to_pool, set_pool_use
from drafter.pool_index.records import feed_key_of, owner_tag_of


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
    trace_parent: str = ""
    """The span that the sequence is part of; used at creation only."""


class History(IndexedText):
    """The known tokens of one sequence; owned by the event loop, through the store.

    Attributes:
        sequence_id: of the sequence.
        prompt_length: how many of its tokens are prompt, once the prompt has arrived whole.
        slot: its place in the store's table; set by the store.
        is_stored: whether the store still holds it; set by the store.
        num_fed: how many tokens, from `feed_start` on, have been fed to its pool.
    """

    __slots__ = ("is_stored", "num_fed", "prompt_length", "sequence_id", "slot")

    def __init__(
        self, *, params: NgramParams, prompt_length: int, max_tokens: int, sequence_id: str = ""
    ) -> None:
        super().__init__(params=params, max_tokens=max_tokens)
        self.sequence_id = sequence_id
        self.prompt_length = prompt_length
        self.slot = -1
        self.is_stored = False
        self.num_fed = 0
        if params.pool_id:
            link_to_pool(self.address, NEVER, 0)
            self.record_fed(0)

    @property
    def feed_start(self) -> int:
        """Start of the text that feeds its pool while it grows."""
        return self.prompt_length if self.params.pool_keep is Keep.OUTPUT else 0

    def record_fed(self, num_fed: int) -> None:
        """Records how much of the text its pool has been fed; for a sequence that names one."""
        self.num_fed = num_fed
        params = self.params
        feed_at = tag = 0
        if params.pool_feed_tokens > 0:
            feed_at = self.feed_start + num_fed + params.pool_feed_tokens
            tag = owner_tag_of(feed_key_of(self.sequence_id))
        set_pool_use(self.address, params.pool_min_ngram, feed_at, tag)
