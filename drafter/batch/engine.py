"""Answers batches: append, answer, write, in time slices between those of other streams.

Owns the order of work within a batch and across streams, and isolates failures. Kernels process the
rows of a usual verifier step, in four calls for the whole batch: `scan_request`, `append_rows`,
`answer_rows`, `write_response`. A row that is odd (a creation, long text, a gap, a text that must
grow) goes through protobuf and `drafter.history` in its place in the same order. After a slice of
about a millisecond other streams have their turn; bulk yields to live batches (`time_slices.py`).
Texts that a batch leaves unindexed are indexed after its response is written (`indexer.py`). Does
not know RPCs.
"""

import time
from collections.abc import Callable, Sequence

from drafter.batch import wire
from drafter.batch.answer import MUST_LINK, answer_rows
from drafter.batch.append import append_rows
from drafter.batch.batch import Batch
from drafter.batch.indexer import Indexer
from drafter.batch.scan import INVALID, LONG_TAIL, OUT_OF_SYNC, SHORT_TAIL, TEXT
from drafter.batch.time_slices import TimeSlice, TimeSlices
from drafter.budgets import (
    FORGOTTEN_AT_ONCE,
    MAX_APPENDED_UNINDEXED,
    MAX_AWAITED_NGRAMS,
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
                (`scan.OPEN` and so on) and with its duration in seconds.
            on_failure: called for every isolated failure, after it was logged.
        """
        self.store = store
        self.pools = pools
        self.slices = TimeSlices()
        self.indexer = Indexer(store, slices=self.slices, on_failure=self._forget)
        self._logger = logger
        self._on_batch = on_batch
        self._on_failure = on_failure

    async def answer(self, batch: Batch) -> bytes:
        """Answers a scanned batch; call `finish` after the response was written.

        Returns:
            A ProposeResponse.
        """
        if batch.is_bulk:
            async with self.slices.bulk() as time_slice:
                await self._append_and_answer(batch, time_slice)
        else:
            time_slice = self.slices.live()
            await self._append_and_answer(batch, time_slice)
        response = batch.write()
        batch.duration_s = time.perf_counter() - batch.scanned_s - time_slice.held_back_s
        return response

    def finish(self, batch: Batch) -> None:
        """Records the metrics of an answered batch, and hands its backlog to the indexer."""
        self._on_batch(batch.tally.tolist(), batch.duration_s)
        if batch.backlog:
            self.indexer.add(
                short_tails=batch.slots_with(SHORT_TAIL),
                long_tails=batch.slots_with(LONG_TAIL),
            )
        self.pools.start_work()

    async def release(self, releases: Sequence[drafter_pb2.Release]) -> None:
        """Forgets sequences."""
        await self._release(releases, self.slices.live())

    async def _append_and_answer(self, batch: Batch, time_slice: TimeSlice) -> None:
        has_expired = self._forget_expired()
        if batch.releases:
            await self._release(wire.named_releases(batch.releases), time_slice)
        i = 0
        while i < batch.num_rows:
            if time_slice.is_over:
                await self._pause(batch, i, time_slice)
                has_expired = self._forget_expired()
            # While expired sequences are left, the store checks each delta's own.
            stop = i if has_expired else min(i + ROWS_PER_CALL, batch.num_rows)
            i = self._append_run(batch, i, stop)
            if i < stop or has_expired:
                self._append_odd(batch, i)
                i += 1
        await self._answer_open(batch, time_slice)

    def _append_run(self, batch: Batch, first: int, stop: int) -> int:
        """Appends rows from `first` on; returns the first that is odd, or `stop`."""
        if first == stop:
            return first
        try:
            return append_rows(
                batch.payload,
                batch.rows,
                first,
                stop,
                self.store.table,
                self.store.now_s(),
                batch.max_draft_tokens,
                MAX_APPENDED_UNINDEXED,
            )
        except Exception:
            # Our own fault. Tokens that were appended may be appended again: they agree.
            return first

    def _append_odd(self, batch: Batch, i: int) -> None:
        """Appends one row by way of protobuf; an error in it affects no other row."""
        # A creation may evict sequences of this batch.
        batch.hold(i)
        message = batch.delta(i)
        try:
            delta = wire.delta_from_proto(message)
            history = self.store.append(delta, batch.lease)
        except OutOfSyncError as error:
            batch.refuse(i, OUT_OF_SYNC, known_length=error.known_length)
        except InvalidDeltaError as error:
            batch.refuse(i, INVALID, message=str(error))
        except Exception:
            # Our own fault, or no memory left: the history may be damaged.
            self._count_failure(message.sequence_id)
            self.store.release(message.sequence_id)
            batch.refuse(i, INVALID, message=_INTERNAL_ERROR)
        else:
            batch.ask(i, history)
            num_ngrams = history.num_unindexed * history.params.num_tables
            if batch.is_open(i) and num_ngrams > MAX_AWAITED_NGRAMS:
                batch.answer_indexing(i)

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
                await self._pause(batch, batch.num_rows, time_slice)

    def _unblock(self, batch: Batch, first: int, stop: int, time_slice: TimeSlice) -> None:
        """Removes what keeps rows of [first, stop) open, other than the budget."""
        batch.hold(batch.num_rows)
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
        batch.hold(batch.num_rows)
        if not batch.is_open(i):
            return
        self._forget(batch.history(i))
        batch.refuse(i, INVALID, message=_INTERNAL_ERROR)

    def _forget(self, history: History) -> None:
        """Forgets a sequence after a failure; called while the exception is handled."""
        self._count_failure(history.sequence_id)
        if history.is_stored:
            self.store.release(history.sequence_id)

    def _count_failure(self, sequence_id: str) -> None:
        self._logger.exception("sequence_failed", sequence_id=sequence_id)
        self._on_failure(Failure.SEQUENCE)

    async def _pause(self, batch: Batch, num_appended: int, time_slice: TimeSlice) -> None:
        """Yields to other streams; the first `num_appended` rows hold addresses of texts."""
        batch.hold(num_appended)
        await time_slice.pause()
        batch.refresh()

    def _forget_expired(self) -> bool:
        """Forgets expired sequences; returns whether more may be left."""
        return self.store.forget_expired(FORGOTTEN_AT_ONCE) == FORGOTTEN_AT_ONCE

    async def _release(
        self, releases: Sequence[drafter_pb2.Release], time_slice: TimeSlice
    ) -> None:
        for release in releases:
            if time_slice.is_over:
                await time_slice.pause()
            try:
                history = self.store.release(release.sequence_id)
                if history is not None:
                    keep = wire.keep_from_proto(release.keep)
                    self.pools.keep(history, keep, release.feed_id, release.length)
            except Exception:
                # Our own fault, or no memory left for the text. The sequence is forgotten, and the
                # others are released.
                self._logger.exception("release_failed", sequence_id=release.sequence_id)
                self._on_failure(Failure.RELEASE)
