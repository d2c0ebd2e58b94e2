"""The background indexer: does what answered batches leave to be done, a little at a time.

Owns the backlog, in three parts: texts with short unindexed tails, which come first, since a longer
tail makes each proposal slower; texts that are to feed their pools; and texts with long tails,
which leave the event loop alone between steps. Does not know batches.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import numpy as np

from drafter.batch.answer import index_texts
from drafter.batch.budgets import (
    FED_AT_ONCE,
    GROWTH_S,
    NGRAMS_PER_LONG_STEP,
    NGRAMS_PER_STEP,
    ROWS_PER_CALL,
)
from drafter.batch.time_slices import TimeSlices
from drafter.history.history import History
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore
from drafter.ngram.index import DONE, MUST_GROW
from drafter.ngram.text import HASH_BASE


class Indexer:
    """Owned by the event loop. The backlog names slots; whatever text is there by now is served.

    Attributes:
        task: does the work; None: there was none yet.
    """

    def __init__(
        self,
        store: HistoryStore,
        pools: PoolDrafts,
        *,
        slices: TimeSlices,
        on_failure: Callable[[History], None],
    ) -> None:
        """Wires it up.

        Args:
            store: the histories.
            pools: what sequences have to do with shared pools.
            slices: long tails get theirs.
            on_failure: called, while the exception is handled, with the history of a sequence that
                could not be indexed; it is to be forgotten.
        """
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._pools = pools
        self._slices = slices
        self._on_failure = on_failure
        # In the order in which they came; dicts as sets.
        self._short_tails: dict[int, None] = {}
        self._long_tails: dict[int, None] = {}
        self._feeding: dict[int, None] = {}
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether something is left to do."""
        return bool(self._short_tails or self._long_tails or self._feeding)

    def add(
        self, *, short_tails: Iterable[int], long_tails: Iterable[int], feeding: Iterable[int]
    ) -> None:
        """Adds to the backlog, and sees to it; returns at once.

        Args:
            short_tails: slots of texts with short unindexed tails.
            long_tails: slots of texts with long ones.
            feeding: slots of texts that are to feed their pools.
        """
        self._short_tails.update(dict.fromkeys(short_tails))
        self._long_tails.update(dict.fromkeys(long_tails))
        self._feeding.update(dict.fromkeys(feeding))
        if self.has_work and not self._is_closed and (self.task is None or self.task.done()):
            self.task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Ends the work, done or not."""
        self._is_closed = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _work(self) -> None:
        """Works step by step; whatever else there is to do on the event loop comes first."""
        while self.has_work:
            if self._short_tails:
                await asyncio.sleep(0)
                self._index(self._short_tails, ROWS_PER_CALL, NGRAMS_PER_STEP)
            elif self._feeding:
                await asyncio.sleep(0)
                self._feed()
            else:
                await self._slices.cool_down()
            # However many short tails live batches bring, long ones get their slices too.
            if self._long_tails and self._slices.is_cool:
                self._index(self._long_tails, 1, NGRAMS_PER_LONG_STEP)
                self._slices.end_bulk_slice()

    def _index(self, tails: dict[int, None], num_texts: int, num_ngrams: int) -> None:
        """Enters n-grams of the first texts; those that are done leave the backlog.

        A sequence that cannot be indexed is forgotten; the others go on.
        """
        slots = np.array(list(itertools.islice(tails, num_texts)), dtype=np.int64)
        statuses = np.empty(len(slots), dtype=np.int64)
        try:
            index_texts(self._store.table.records, slots, HASH_BASE, num_ngrams, statuses)
        except Exception:
            # A mistake of ours, or no memory left. Whose fault it is shows when each is alone.
            if len(slots) > 1:
                self._index(tails, 1, num_ngrams)
            else:
                self._forget(int(slots[0]))
                del tails[int(slots[0])]
            return
        end_s = time.perf_counter() + GROWTH_S
        for slot, status in zip(slots.tolist(), statuses.tolist(), strict=True):
            if status == DONE:
                del tails[slot]
            elif status >= MUST_GROW and time.perf_counter() < end_s:
                history = self._store.by_slot[slot]
                assert history is not None, "the kernel found it"
                try:
                    self._store.grow_table(history, status - MUST_GROW)
                except Exception:
                    # A mistake of ours, or no memory left: what the index holds is in doubt.
                    self._forget(slot)

    def _feed(self) -> None:
        """Feeds their pools what some sequences have grown by."""
        for slot in list(itertools.islice(self._feeding, FED_AT_ONCE)):
            del self._feeding[slot]
            history = self._store.by_slot[slot]
            if history is not None:
                try:
                    self._pools.feed(history)
                except Exception:
                    # A mistake of ours, or no memory left.
                    self._forget(slot)

    def _forget(self, slot: int) -> None:
        history = self._store.by_slot[slot]
        if history is not None:
            self._on_failure(history)
