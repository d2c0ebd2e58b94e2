"""The known tokens of one sequence: an indexed text, its prompt length, and its use of a pool.

Does not know why tokens are appended or refused, nor that there are other sequences (`store.py`).
"""

from drafter.ngram.params import Keep, NgramParams
from drafter.ngram.text import IndexedText
from drafter.pool_index.link import NEVER, link_to_pool, set_pool_use
from drafter.pool_index.records import feed_key_of, owner_tag_of


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
