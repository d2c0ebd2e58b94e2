"""The background indexer: works on the backlog that answered batches leave, in small steps.

Owns the backlog, in two parts: texts with short unindexed tails, which come first, since a longer
tail makes each proposal slower; and texts with long tails, after each step of which the event loop
is left alone for a while. Does not know batches.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import numpy as np

from drafter.batch.answer import index_texts
from drafter.batch.time_slices import TimeSlices
from drafter.budgets import (
    GROWTH_S,
    MAX_SHORT_TAIL,
    MIN_UNINDEXED,
    NGRAMS_PER_LONG_STEP,
    NGRAMS_PER_STEP,
)
from drafter.history.history import History
from drafter.history.store import HistoryStore
from drafter.ngram.index import DONE, MUST_GROW
from drafter.ngram.text import HASH_BASE

# A step's n-grams finish no more: a tail in the backlog has `MIN_UNINDEXED` tokens at least.
_TEXTS_PER_STEP = NGRAMS_PER_STEP // MIN_UNINDEXED


class Indexer:
    """Owned by the event loop. Histories that are stored no longer leave the backlog.

    Attributes:
        task: runs while there is a backlog; None: there was none yet.
    """

    def __init__(
        self,
        store: HistoryStore,
        *,
        slices: TimeSlices,
        on_failure: Callable[[History], None],
    ) -> None:
        """Wires it up.

        Args:
            store: the histories.
            slices: long tails wait for theirs.
            on_failure: called, while the exception is handled, with a history that could not be
                indexed; must forget its sequence.
        """
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._slices = slices
        self._on_failure = on_failure
        # In the order in which they came; dicts as sets.
        self._short_tails: dict[History, None] = {}
        self._long_tails: dict[History, None] = {}
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether there is a backlog."""
        return bool(self._short_tails or self._long_tails)

    def add(self, histories: Iterable[History]) -> None:
        """Adds those with unindexed tails to the backlog, and starts the task; returns at once."""
        for history in histories:
            num_unindexed = history.num_unindexed
            if num_unindexed >= MIN_UNINDEXED:
                is_short = num_unindexed <= MAX_SHORT_TAIL
                (self._short_tails if is_short else self._long_tails)[history] = None
        if self.has_work and not self._is_closed and (self.task is None or self.task.done()):
            self.task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Cancels the task; a backlog may be left."""
        self._is_closed = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

    async def _work(self) -> None:
        """Works step by step; other tasks of the event loop run between steps."""
        while self.has_work:
            if self._short_tails:
                await asyncio.sleep(0)
                self._index(self._short_tails, _TEXTS_PER_STEP, NGRAMS_PER_STEP)
            else:
                await self._slices.cool_down()
            # However many short tails live batches bring, long ones get their slices too.
            if self._long_tails and self._slices.is_cool:
                self._index(self._long_tails, 1, NGRAMS_PER_LONG_STEP)
                self._slices.end_bulk_slice()

    def _index(self, tails: dict[History, None], num_texts: int, num_ngrams: int) -> None:
        """Enters n-grams of the first texts; texts that are up to date leave the backlog.

        A sequence that cannot be indexed is forgotten; the others are indexed.
        """
        histories = []
        for history in list(itertools.islice(tails, num_texts)):
            if history.is_stored:
                histories.append(history)
            else:
                del tails[history]
        if not histories:
            return
        headers = np.array([history.address for history in histories], dtype=np.int64)
        statuses = np.empty(len(histories), dtype=np.int64)
        try:
            index_texts(headers, HASH_BASE, num_ngrams, statuses)
        except Exception:
            # Our own fault, or no memory left. One text per call finds the one that fails.
            if len(histories) > 1:
                self._index(tails, 1, num_ngrams)
            else:
                self._on_failure(histories[0])
                del tails[histories[0]]
            return
        end_s = time.perf_counter() + GROWTH_S
        for history, status in zip(histories, statuses.tolist(), strict=True):
            if status == DONE:
                del tails[history]
            elif status >= MUST_GROW and history.is_stored and time.perf_counter() < end_s:
                try:
                    self._store.grow_table(history, status - MUST_GROW)
                except Exception:
                    # Our own fault, or no memory left: the index may be damaged.
                    self._on_failure(history)
