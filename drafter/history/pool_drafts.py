"""What a sequence does with its pool: it is linked to it, and feeds it its text.

When a draft comes from a pool is known to `drafter.pool_index.propose`, how pools are kept to
`drafter.pools`.
"""

from collections.abc import Callable

from drafter.history.history import History
from drafter.ngram.params import Keep
from drafter.pool_index.link import link_to_pool
from drafter.pools.store import PoolStore


class PoolDrafts:
    """Owned by the event loop, like the store that it uses."""

    def __init__(self, store: PoolStore, *, on_work: Callable[[], None]) -> None:
        """Wires it up.

        Args:
            store: all pools.
            on_work: called when the store may have work to do.
        """
        self.store = store
        self._on_work = on_work

    def start_work(self) -> None:
        """Has done what is to do, texts that expired included; returns at once."""
        if self.store.has_work:
            self._on_work()

    def feed(self, history: History) -> None:
        """Feeds its pool what a sequence has grown by, if it has by enough."""
        if history.is_feed_due:
            self._grow(history, history.length)

    def keep(self, history: History, keep: Keep, feed_id: str, length: int = 0) -> None:
        """Leaves a finished sequence's text in its pool, if it names one.

        Args:
            history: of a sequence that is not known any more.
            keep: what of its text. Of one that has fed its pool while it grew, what is left of
                the same text, unless nothing is to be kept.
            feed_id: see `PoolStore.feed`; that of one that fed its pool is its own id.
            length: its text ends there; 0: at its last token.
        """
        params = history.params
        if keep is Keep.NOTHING or not params.pool_id:
            return
        end = length or history.length
        if params.pool_feed_tokens > 0:
            self._grow(history, end)
            return
        start = history.prompt_length if keep is Keep.OUTPUT else 0
        self.store.feed(
            params.pool_id,
            history.token_ids[start:end],
            feed_id=feed_id,
            ngram_mask=params.ngram_mask,
        )
        self._on_work()

    def link(self, history: History) -> None:
        """Writes into a text where its pool is now, if it names one."""
        params = history.params
        if params.pool_id:
            block = self.store.block_of(params.pool_id, params.ngram_mask)
            link_to_pool(history.address, self.store.generation, block)

    def _grow(self, history: History, end: int) -> None:
        params = history.params
        num_fed = self.store.grow(
            params.pool_id,
            history.token_ids[history.feed_start : end],
            feed_id=history.sequence_id,
            num_fed=history.num_fed,
            ngram_mask=params.ngram_mask,
        )
        history.record_fed(num_fed)
        self._on_work()
