"""Answers batches: in the order of their deltas, and by turns with those of other streams.

Owns the order of things within a batch and across streams. A batch is answered on the event loop.
What a verifier's step usually brings is answered at once, by one kernel call. Of anything else
first the deltas are taken in order, then all sequences are answered together, step by step; such
batches of several streams may interleave between deltas and between steps, and after every slice of
about a millisecond the loop gets its turn (`turns.py`: replayed text goes behind what is live).
What was new in a batch is indexed when its answer is on its way, in the background, a little at a
time. Does not know RPCs (`service.py`).
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from drafter.batch import wire
from drafter.batch.batch_rows import BatchRows
from drafter.batch.drafting import Drafting, Work
from drafter.batch.live_answerer import LiveAnswerer
from drafter.batch.live_batch import LiveBatch, Scratch
from drafter.batch.live_desk import MOST_ROWS
from drafter.batch.time_slices import Turn, Turns
from drafter.failures import Failure
from drafter.history.messages import Proposal, ProposalStatus
from drafter.history.store import StreamLease
from drafter.metrics import DrafterMetrics
from drafter.refusals import InvalidDeltaError, OutOfSyncError
from servicekit.logs import Logger
from tandem.v1 import drafter_pb2

# How many sequences feed their pools at one go: about a hundred microseconds.
_MOST_FED_AT_ONCE = 8

MAX_FORGOTTEN_AT_ONCE = 64
"""How many sequences are forgotten at one go: a few hundred microseconds."""


class Batches:
    """Owned by the event loop.

    What is to be noted of a batch that one kernel call answered waits until the answer is on its
    way, or the next batch comes: after a pause each line of that is as slow as a sequence's draft.

    Attributes:
        turns: whose turn it is.
        indexing: the task that indexes texts that nobody waits for; None: there was none yet.
    """

    def __init__(self, drafting: Drafting, *, metrics: DrafterMetrics, logger: Logger) -> None:
        """Wires it up.

        Args:
            drafting: histories and drafts.
            metrics: what batches are counted in.
            logger: for what no client is told.
        """
        self.turns = Turns()
        self.indexing: asyncio.Task[None] | None = None
        self._drafting = drafting
        self._store = drafting.store
        self._metrics = metrics
        self._logger = logger
        self._scratch = Scratch()
        self._live = LiveAnswerer(drafting)
        # How long the last live batch took, until that is noted.
        self._live_s: float | None = None
        # The slots of texts that answered batches have left to be indexed.
        self._unindexed: deque[npt.NDArray[np.int64]] = deque()
        # The slots of texts that are to feed their pools.
        self._feeding: dict[int, None] = {}
        self._is_closing = False

    async def close(self) -> None:
        """Ends what goes on in the background."""
        self._is_closing = True
        if self.indexing is not None:
            self.indexing.cancel()
            await asyncio.wait([self.indexing])

    async def answer_message(
        self,
        payload: bytes,
        lease: StreamLease,
        see_releases: Callable[[Sequence[drafter_pb2.Release]], None],
    ) -> tuple[bytes, Work | None]:
        """Answers a ProposeRequest.

        Args:
            payload: the message.
            lease: of the stream that it came on.
            see_releases: called with its releases, if there are any, before it is answered.

        Returns:
            A ProposeResponse, and what to call `index` with when that is on its way.

        Raises:
            DecodeError: it is none.
            MalformedBatchError, MessageLimitError: it is not one that a client may send.
        """
        self._note_live_batch()
        start_s = time.perf_counter()
        response = self._answer_live(payload)
        if response is not None:
            self.turns.note_live()
            self._live_s = time.perf_counter() - start_s
            return response, None
        batch = LiveBatch(payload, self._store, self._scratch)
        rows = BatchRows(len(batch))
        self._live.hand_over(rows)
        if batch.releases:
            see_releases(batch.releases)
        work = await self._answer(
            batch,
            wire.named_releases(batch.releases),
            rows,
            first=self._live.num_taken,
            is_bulk=batch.is_bulk,
            lease=lease,
        )
        return await batch.respond(rows), work

    def _answer_live(self, payload: bytes) -> bytes | None:
        """Answers a batch in one call, if that can be done, see `LiveAnswerer.answer`."""
        try:
            return self._live.answer(payload)
        except Exception:
            # A mistake of ours, or no memory left. What was appended may be appended again: it
            # agrees. So the batch is answered as a whole again, and who fails then fails alone.
            self._live.forget_batch()
            return None

    async def answer_deltas(
        self,
        deltas: Sequence[drafter_pb2.SequenceDelta],
        releases: Sequence[drafter_pb2.Release],
    ) -> tuple[BatchRows, Work]:
        """Answers a batch that was checked; its sequences are tied to no stream."""
        rows = BatchRows(len(deltas))
        work = await self._answer(
            deltas, releases, rows, first=0, is_bulk=wire.is_bulk(deltas), lease=None
        )
        return rows, work

    def index(self, work: Work | None) -> None:
        """Sees to it that what an answered batch brought gets into the indexes.

        Args:
            work: of the batch; None: one call answered it.
        """
        if work is not None:
            slots = work.slots_to_index()
            for first in range(0, len(slots), MOST_ROWS):
                self._unindexed.append(slots[first : first + MOST_ROWS])
            self._feeding.update(dict.fromkeys(work.slots_to_feed()))
        self._note_live_batch()
        self._index_in_background()

    async def release(self, releases: Iterable[drafter_pb2.Release]) -> None:
        """Forgets sequences."""
        async with self.turns.take(is_bulk=False) as turn:
            await self._release(releases, turn)

    async def _answer(
        self,
        batch: LiveBatch | Sequence[drafter_pb2.SequenceDelta],
        releases: Sequence[drafter_pb2.Release],
        rows: BatchRows,
        *,
        first: int,
        is_bulk: bool,
        lease: StreamLease | None,
    ) -> Work:
        """Applies a batch that was checked, in order, and answers every sequence of it.

        Args:
            batch: the deltas.
            releases: come before them.
            rows: of the batch.
            first: the delta to begin with; those before it are in `rows` already.
            is_bulk: whether it brings long text.
            lease: of the stream that it came on, if any.
        """
        start_s = time.perf_counter()
        num_sequences = len(batch)
        most_draft_tokens = wire.most_draft_tokens(num_sequences)
        async with self.turns.take(is_bulk=is_bulk) as turn:
            # If some that have expired are left, each delta has to see whether its own is one.
            has_expired = self._forget_expired()
            await self._release(releases, turn)
            i = first
            while i < num_sequences:
                if turn.is_over:
                    await turn.pause()
                    rows.refresh()
                    has_expired = self._forget_expired()
                if isinstance(batch, LiveBatch) and batch.is_scanned and not has_expired:
                    after = batch.take(i, most_draft_tokens, rows)
                    if after > i:
                        i = after
                        continue
                self._take(batch[i], lease, most_draft_tokens, rows, i)
                i += 1
            work = self._drafting.begin(rows)
            while not work.step():
                await turn.pause()
                rows.refresh()
        self._index_in_background()
        self._metrics.observe_batch(rows, time.perf_counter() - start_s - turn.held_back_s)
        return work

    def _note_live_batch(self) -> None:
        """Notes what came of the last live batch, if that was not done yet."""
        if self._live_s is None:
            return
        self._metrics.observe(self._live.num_by_outcome, self._live_s)
        behind = self._live.behind
        if len(behind) > 0:
            self._unindexed.append(behind)
        self._feeding.update(dict.fromkeys(self._live.feeding))
        self._live_s = None
        if self._drafting.pools.store.num_pools > 0:
            self._drafting.pools.see_to_work()

    def _forget_expired(self) -> bool:
        """Forgets what expired; returns whether more of that may be left."""
        return self._store.forget_expired(MAX_FORGOTTEN_AT_ONCE) == MAX_FORGOTTEN_AT_ONCE

    def _take(
        self,
        message: drafter_pb2.SequenceDelta,
        lease: StreamLease | None,
        most_draft_tokens: int,
        rows: BatchRows,
        i: int,
    ) -> None:
        """Appends to one sequence; whatever is wrong with it harms no other."""
        try:
            delta = wire.delta_from_proto(message)
            self._drafting.take(delta, lease, most_draft_tokens, rows, i)
        except OutOfSyncError as error:
            rows.refuse(
                i,
                Proposal(
                    sequence_id=message.sequence_id,
                    status=ProposalStatus.OUT_OF_SYNC,
                    known_length=error.known_length,
                ),
            )
        except InvalidDeltaError as error:
            rows.refuse(
                i,
                Proposal(
                    sequence_id=message.sequence_id,
                    status=ProposalStatus.INVALID,
                    message=str(error),
                ),
            )
        except Exception:
            # A mistake of ours, or no memory left: what is known of the sequence is in doubt.
            self._logger.exception("sequence_failed", sequence_id=message.sequence_id)
            self._metrics.count_failure(Failure.SEQUENCE)
            self._store.release(message.sequence_id)
            rows.refuse(
                i,
                Proposal(
                    sequence_id=message.sequence_id,
                    status=ProposalStatus.INVALID,
                    message="internal error",
                ),
            )

    def _index_in_background(self) -> None:
        """Sees to it that texts are indexed that nobody waits for, and feed their pools."""
        if self._is_closing or not self._has_background_work:
            return
        if self.indexing is None or self.indexing.done():
            self.indexing = asyncio.create_task(self._index())

    @property
    def _has_background_work(self) -> bool:
        return bool(self._unindexed or self._feeding or self._drafting.is_behind)

    async def _index(self) -> None:
        """Indexes step by step; whatever else there is to do comes first.

        What was drafted from is never held back: the longer it takes, the more has to be looked
        through for each draft. A sequence that cannot be indexed is forgotten; the others go on.
        """
        while self._has_background_work:
            if self._unindexed:
                await asyncio.sleep(0)
                # Those first that have lacked so much for longest.
                self._index_slots(self._unindexed.popleft())
            elif self._feeding:
                await asyncio.sleep(0)
                for slot in list(itertools.islice(self._feeding, _MOST_FED_AT_ONCE)):
                    del self._feeding[slot]
                    self._drafting.feed(slot)
            else:
                await self.turns.wait_until_rested()
            # However much live batches bring, what nobody drafts from yet gets its slices too.
            if self._drafting.is_behind and self.turns.is_rested:
                self._drafting.index_step()
                self.turns.end_slice()

    def _index_slots(self, slots: npt.NDArray[np.int64]) -> None:
        """Goes on indexing the texts at these slots; what they still lack is left for later."""
        try:
            slots = self._live.index_step(slots)
        except Exception:
            # A mistake of ours, or no memory left. Whose fault it is shows when each is alone.
            if len(slots) > 1:
                self._unindexed.extendleft(slots[i : i + 1].copy() for i in range(len(slots)))
            else:
                history = self._store.by_slot[int(slots[0])]
                if history is not None:
                    self._drafting.forget(history)
            return
        if len(slots) > 0:
            self._unindexed.appendleft(slots)

    async def _release(self, releases: Iterable[drafter_pb2.Release], turn: Turn) -> None:
        for release in releases:
            if turn.is_over:
                await turn.pause()
            keep = wire.keep_from_proto(release.keep)
            try:
                self._drafting.release(release.sequence_id, keep, release.feed_id, release.length)
            except Exception:
                # A mistake of ours, or no memory left for the text: the sequence is forgotten, and
                # the others are released.
                self._logger.exception("release_failed", sequence_id=release.sequence_id)
                self._metrics.count_failure(Failure.RELEASE)
