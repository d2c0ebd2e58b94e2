"""How a sequence uses its pool: it is linked to it, and leaves its text there when it is released.

When a draft comes from a pool is known to `drafter.pool_index`, how texts are stored to
`drafter.pools`.
"""

from collections.abc import Callable

from drafter.history.history import History
from drafter.ngram.params import Keep
from drafter.pool_index.link import link_to_pool
from drafter.pool_index.records import FeedOutcome
from drafter.pools.store import PoolStore


class PoolDrafts:
    """Owned by the event loop. `on_work` is called when the store may have work to do."""

    def __init__(self, store: PoolStore, *, on_work: Callable[[], None]) -> None:
        self.store = store
        self._on_work = on_work

    def start_work(self) -> None:
        """Starts the store's work, eviction of expired texts included; returns at once."""
        self._on_work()

    def keep(self, history: History, keep: Keep, feed_id: str = "", length: int = 0) -> bool:
        """Feeds its pool the text of a finished sequence, if it names one; whether the pool has it.

        Args:
            history: of a sequence that was released.
            keep: which part of its text.
            feed_id: see `PoolStore.feed`.
            length: where its text ends; 0: at its last token.
        """
        params = history.params
        if keep is Keep.NOTHING or not params.pool_id:
            return False
        start = history.prompt_length if keep is Keep.OUTPUT else 0
        outcome = self.store.feed(
            params.pool_id,
            history.token_ids[start : length or history.length],
            ngram_mask=params.ngram_mask,
            feed_id=feed_id,
        )
        self._on_work()
        return outcome in (FeedOutcome.KEPT, FeedOutcome.DUPLICATE)

    def link(self, history: History) -> None:
        """Writes the present block of its pool into a text, if it names one."""
        params = history.params
        if params.pool_id:
            block = self.store.block_of(params.pool_id, params.ngram_mask)
            link_to_pool(history.address, self.store.generation, block)
