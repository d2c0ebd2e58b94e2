"""Answers batches: append, answer, write, in time slices between those of other streams.

Owns the order of work within a batch and across streams, and isolates failures. Deltas are appended
one by one; `answer_rows` then answers the rows of a usual verifier step in one call. After a slice
of about a millisecond other streams have their turn; bulk yields to live batches
(`time_slices.py`). Texts that a batch leaves unindexed are indexed after its response is written
(`indexer.py`). Does not know RPCs.
"""

import time
from collections.abc import Callable, Sequence

from drafter.batch import wire
from drafter.batch.answer import INVALID, MUST_LINK, OUT_OF_SYNC, TEXT, answer_rows
from drafter.batch.batch import Batch
from drafter.batch.indexer import Indexer
from drafter.batch.time_slices import TimeSlice, TimeSlices
from drafter.budgets import (
    FORGOTTEN_AT_ONCE,
    MAX_UNINDEXED,
    NGRAMS_PER_ANSWER,
    ROWS_PER_CALL,
)
from drafter.history.history import History
from drafter.history.pool_drafts import PoolDrafts
from drafter.history.store import HistoryStore
from drafter.ngram.index import MUST_GROW, MUST_SCAN
from drafter.ngram.text import HASH_BASE
from drafter.refusals import Failure, InvalidDeltaError, OutOfSyncError
from servicekit.logs import Logger
from tandem.v1 import drafter_pb2

_INTERNAL_ERROR = "internal error"


class DraftEngine:
    """Owned by the event loop.

    Attributes:
        store: the histories.
        pools: links sequences to shared pools, and feeds those.
        slices: time slices of all streams.
        indexer: does the backlog that answered batches leave.
    """

    def __init__(
        self,
        store: HistoryStore,
        pools: PoolDrafts,
        *,
        logger: Logger,
        on_batch: Callable[[Sequence[int], float], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        """Wires it up.

        Args:
            store: the histories.
            pools: links sequences to shared pools, and feeds those.
            logger: for internal errors.
            on_batch: called for every answered batch with the number of rows of each outcome
                (`answer.OPEN` and so on) and with its duration in seconds.
            on_failure: called for every isolated failure, after it was logged.
        """
        self.store = store
        self.pools = pools
        self.slices = TimeSlices()
        self.indexer = Indexer(store, slices=self.slices, on_failure=self._forget)
        self._logger = logger
        self._on_batch = on_batch
        self._on_failure = on_failure

    async def answer(self, batch: Batch) -> drafter_pb2.ProposeResponse:
        """Answers a batch; call `finish` after the response was written."""
        if batch.is_bulk:
            async with self.slices.bulk() as time_slice:
                await self._answer(batch, time_slice)
        else:
            time_slice = self.slices.live()
            await self._answer(batch, time_slice)
        batch.duration_s = time.perf_counter() - batch.started_s - time_slice.held_back_s
        return batch.response

    def finish(self, batch: Batch) -> None:
        """Records the metrics of an answered batch, and hands its backlog to the indexer."""
        self._on_batch(batch.tally(), batch.duration_s)
        self.indexer.add(history for history in batch.histories if history is not None)
        self.pools.start_work()

    async def release(self, releases: Sequence[drafter_pb2.Release]) -> int:
        """Forgets sequences; returns how many texts their pools have."""
        return await self._release(releases, self.slices.live())

    async def _answer(self, batch: Batch, time_slice: TimeSlice) -> None:
        self.store.forget_expired(FORGOTTEN_AT_ONCE)
        if batch.request.releases:
            await self._release(wire.named_releases(batch.request.releases), time_slice)
        for delta in batch.request.sequences:
            if time_slice.is_over:
                await time_slice.pause()
                self.store.forget_expired(FORGOTTEN_AT_ONCE)
            self._append(batch, delta)
        batch.place_drafts()
        batch.locate()
        await self._answer_open(batch, time_slice)
        for i in range(batch.num_rows):
            if time_slice.is_over:
                await time_slice.pause()
            batch.write(i)

    def _append(self, batch: Batch, message: drafter_pb2.SequenceDelta) -> None:
        """Appends one delta; an error in it affects no other row."""
        try:
            delta = wire.delta_from_proto(message)
            history = self.store.append(delta, batch.lease)
        except OutOfSyncError as error:
            batch.refuse_next(OUT_OF_SYNC, known_length=error.known_length)
        except InvalidDeltaError as error:
            batch.refuse_next(INVALID, message=str(error))
        except Exception:
            # Our own fault, or no memory left: the history may be damaged.
            self._count_failure(message.sequence_id)
            self.store.release(message.sequence_id)
            batch.refuse_next(INVALID, message=_INTERNAL_ERROR)
        else:
            batch.ask(delta, history)

    async def _answer_open(self, batch: Batch, time_slice: TimeSlice) -> None:
        """Answers all open rows, as many at a time as one call may."""
        first, rows_per_call = 0, ROWS_PER_CALL
        while first < batch.num_rows:
            stop = min(first + rows_per_call, batch.num_rows)
            try:
                num_open = answer_rows(
                    batch.rows,
                    first,
                    stop,
                    HASH_BASE,
                    NGRAMS_PER_ANSWER,
                    MAX_UNINDEXED,
                    self.pools.store.arena,
                    self.pools.store.generation,
                    batch.drafts,
                )
                if num_open > 0:
                    self._unblock(batch, first, stop, time_slice)
            except Exception:
                # Our own fault, or no memory left. One row per call finds the one that fails.
                num_open = stop - first
                if num_open == 1:
                    self._fail(batch, first)
                    num_open = 0
                rows_per_call = 1
            if num_open == 0:
                first = stop
            if first < batch.num_rows and time_slice.is_over:
                await time_slice.pause()
                batch.locate()

    def _unblock(self, batch: Batch, first: int, stop: int, time_slice: TimeSlice) -> None:
        """Removes what keeps rows of [first, stop) open, other than the budget."""
        for i, why in batch.open_rows(first, stop):
            history = batch.history(i)
            if why == MUST_LINK:
                self.pools.link(history)
            elif why == MUST_SCAN:
                batch.begin_scan(i)
            elif why >= MUST_GROW:
                try:
                    self.store.grow_table(history, why - MUST_GROW)
                except Exception:
                    # Our own fault, or no memory left: the index may be damaged.
                    self._fail(batch, i)
                else:
                    batch.rows[i, TEXT] = history.address
                if time_slice.is_over:
                    break

    def _fail(self, batch: Batch, i: int) -> None:
        """Forgets the sequence of a row; called while the exception is handled."""
        if not batch.is_open(i):
            return
        self._forget(batch.history(i))
        batch.refuse_open(i, _INTERNAL_ERROR)

    def _forget(self, history: History) -> None:
        """Forgets a sequence after a failure; called while the exception is handled."""
        self._count_failure(history.sequence_id)
        if history.is_stored:
            self.store.release(history.sequence_id)

    def _count_failure(self, sequence_id: str) -> None:
        self._logger.exception("sequence_failed", sequence_id=sequence_id)
        self._on_failure(Failure.SEQUENCE)

    async def _release(self, releases: Sequence[drafter_pb2.Release], time_slice: TimeSlice) -> int:
        num_kept = 0
        for release in releases:
            if time_slice.is_over:
                await time_slice.pause()
            try:
                history = self.store.release(release.sequence_id)
                if history is not None:
                    keep = wire.keep_from_proto(release.keep)
                    num_kept += self.pools.keep(history, keep, release.feed_id, release.length)
            except Exception:
                # Our own fault, or no memory left for the text. The sequence is forgotten, and the
                # others are released.
                self._logger.exception("release_failed", sequence_id=release.sequence_id)
                self._on_failure(Failure.RELEASE)
        return num_kept
