"""The DrafterService RPCs: requests to the drafting core and back.

Owns the order of things within a batch and across streams, and the life of streams. A batch is
answered on the event loop: first its deltas are taken in order, then all of its sequences are
answered together, step by step, and when the answer of a stream's batch is on its way, what was
new in it is indexed. Batches of several streams may interleave between deltas and between steps,
and after every slice of about a millisecond the loop gets its turn (`turns.py`: replayed text goes
behind what is live). What bounds a stream: it has one request in flight, read
only when the one before was answered and handed to the transport; and a client that leaves its
answers unread, so that the transport takes no more, is disconnected.
"""

import asyncio
import enum
import time
from collections.abc import AsyncIterator, Iterable, Sequence

import grpc

from drafter import wire
from drafter.batch_rows import BatchRows
from drafter.drafting import Drafting, Work
from drafter.errors import NotServingError, UnreadAnswersError, UnsupportedFieldError
from drafter.history_store import StreamLease
from drafter.live_batch import LiveBatch, Scratch
from drafter.messages import Proposal, ProposalStatus
from drafter.metrics import DrafterMetrics
from drafter.refusals import InvalidDeltaError, OutOfSyncError
from drafter.turns import Turn, Turns
from servicekit.errors import MalformedRequestError
from servicekit.logs import Logger
from tandem.v1 import drafter_pb2, drafter_pb2_grpc

SERVICE_NAME = "tandem.v1.DrafterService"
STREAM_METHOD = "ProposeStream"

SWEEP_INTERVAL_S = 1.0
"""How often expired sequences are looked for when no request does it."""

# How many sequences are forgotten at one go: a few hundred microseconds.
_MAX_FORGOTTEN_AT_ONCE = 64

_StreamContext = grpc.aio.ServicerContext[bytes, bytes]
_ProposeContext = grpc.aio.ServicerContext[drafter_pb2.ProposeRequest, drafter_pb2.ProposeResponse]
_ReleaseContext = grpc.aio.ServicerContext[drafter_pb2.ReleaseRequest, drafter_pb2.ReleaseResponse]
_LoadContext = grpc.aio.ServicerContext[
    drafter_pb2.GetDrafterLoadRequest, drafter_pb2.GetDrafterLoadResponse
]


class _State(enum.Enum):
    STARTING = "the drafter is starting"
    SERVING = "the drafter is serving"
    DRAINING = "the drafter is shutting down"


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers batches. Owned by the event loop; refuses all of them until `open`."""

    def __init__(
        self,
        drafting: Drafting,
        *,
        metrics: DrafterMetrics,
        instance_id: str,
        logger: Logger,
        unread_timeout_s: float,
    ) -> None:
        """Wires it up.

        Args:
            drafting: histories and drafts.
            metrics: what batches are counted in.
            instance_id: made at start.
            logger: for what no client is told.
            unread_timeout_s: how long a stream may leave an answer unread.
        """
        self._drafting = drafting
        self._store = drafting.store
        self._metrics = metrics
        self._instance_id = instance_id
        self._logger = logger
        self._unread_timeout_s = unread_timeout_s
        self._turns = Turns()
        self._scratch = Scratch()
        self._state = _State.STARTING
        # One for each stream that waits for its next request; drain ends these waits.
        self._waits: set[asyncio.Timeout] = set()
        self._indexing: asyncio.Task[None] | None = None
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    def open(self) -> None:
        """Begins to take requests: the proposer is warm."""
        self._state = _State.SERVING

    async def drain(self) -> None:
        """Answers what has been read, and ends all streams and what goes on behind them."""
        self._state = _State.DRAINING
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        await self._no_streams.wait()
        if self._indexing is not None:
            self._indexing.cancel()
            await asyncio.wait([self._indexing])

    async def sweep_forever(self) -> None:
        """Forgets what expires while no requests come; runs until cancelled."""
        pause_s = SWEEP_INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            self._drafting.pools.see_to_work()
            may_have_more = (
                self._store.forget_expired(_MAX_FORGOTTEN_AT_ONCE) == _MAX_FORGOTTEN_AT_ONCE
            )
            pause_s = 0.0 if may_have_more else SWEEP_INTERVAL_S

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers all methods; the stream's messages come and go as bytes."""
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self.ProposeStream
        )
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)
        # Of several handlers of a method, the last that was added has it.
        server.add_registered_method_handlers(SERVICE_NAME, {STREAM_METHOD: handler})

    async def Propose(
        self, request: drafter_pb2.ProposeRequest, context: _ProposeContext
    ) -> drafter_pb2.ProposeResponse:
        """Answers one batch; its sequences are tied to no stream."""
        self._check_serving()
        deltas = wire.check_propose_request(request)
        _refuse_unsupported_keep(request.releases)
        rows, work = await self._answer(
            deltas, request.releases, is_bulk=wire.is_bulk(deltas), lease=None
        )
        sequence_ids = [delta.sequence_id for delta in deltas]
        response = wire.response_to_proto(request.batch_id, rows.proposals(sequence_ids))
        await self._index_answered(work)
        return response

    async def ProposeStream(  # type: ignore[override]  # bytes, and it writes its responses itself
        self, request_iterator: AsyncIterator[bytes], context: _StreamContext
    ) -> None:
        """Answers batches one after the other, until the client ends the stream or drain does.

        Raises:
            MalformedRequestError: a message is no ProposeRequest.
            UnreadAnswersError: the client does not read them.
        """
        self._check_serving()
        lease = self._store.start_stream()
        self._num_streams += 1
        self._no_streams.clear()
        has_warned = False
        try:
            while (payload := await self._next_request(request_iterator)) is not None:
                batch = self._read(payload)
                if not has_warned:
                    has_warned = self._warn_of_unsupported_keep(batch.releases)
                rows, work = await self._answer(
                    batch, batch.releases, is_bulk=batch.is_bulk, lease=lease
                )
                response = batch.respond(rows)
                try:
                    async with asyncio.timeout(self._unread_timeout_s):
                        await context.write(response)
                except TimeoutError:
                    raise UnreadAnswersError(self._unread_timeout_s) from None
                await self._index_answered(work)
        finally:
            self._store.end_stream(lease)
            self._num_streams -= 1
            if self._num_streams == 0:
                self._no_streams.set()

    async def Release(
        self, request: drafter_pb2.ReleaseRequest, context: _ReleaseContext
    ) -> drafter_pb2.ReleaseResponse:
        """Forgets sequences."""
        wire.check_release_request(request)
        _refuse_unsupported_keep(request.releases)
        async with self._turns.take(is_bulk=False) as turn:
            await self._release(request.releases, turn)
        return drafter_pb2.ReleaseResponse()

    async def GetDrafterLoad(
        self, request: drafter_pb2.GetDrafterLoadRequest, context: _LoadContext
    ) -> drafter_pb2.GetDrafterLoadResponse:
        """Says how full this drafter is."""
        self._store.forget_expired(_MAX_FORGOTTEN_AT_ONCE)
        limits = self._store.limits
        return drafter_pb2.GetDrafterLoadResponse(
            instance_id=self._instance_id,
            num_sequences=self._store.num_sequences,
            max_sequences=limits.max_sequences,
            history_bytes=self._store.history_bytes,
            max_history_bytes=limits.max_history_bytes,
            pool_bytes=self._drafting.pools.store.occupied_bytes,
        )

    async def _next_request(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Returns None at the end of the stream.

        Raises:
            NotServingError: the drafter is shutting down.
        """
        self._check_serving()
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    return await anext(requests, None)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            raise NotServingError(self._state.value) from None

    def _read(self, payload: bytes) -> LiveBatch:
        try:
            return LiveBatch(payload, self._store, self._scratch)
        except wire.DecodeError as error:
            raise MalformedRequestError(f"/{SERVICE_NAME}/{STREAM_METHOD}") from error

    async def _answer(
        self,
        batch: LiveBatch | Sequence[drafter_pb2.SequenceDelta],
        releases: Sequence[drafter_pb2.Release],
        *,
        is_bulk: bool,
        lease: StreamLease | None,
    ) -> tuple[BatchRows, Work]:
        """Applies a batch that was checked, in order, and answers every sequence of it."""
        start_s = time.perf_counter()
        num_sequences = len(batch)
        most_draft_tokens = wire.most_draft_tokens(num_sequences)
        rows = BatchRows(num_sequences)
        async with self._turns.take(is_bulk=is_bulk) as turn:
            # If some that have expired are left, each delta has to see whether its own is one.
            has_expired = (
                self._store.forget_expired(_MAX_FORGOTTEN_AT_ONCE) == _MAX_FORGOTTEN_AT_ONCE
            )
            await self._release(releases, turn)
            i = 0
            while i < num_sequences:
                if turn.is_over:
                    await turn.pause()
                    rows.refresh()
                    has_expired = (
                        self._store.forget_expired(_MAX_FORGOTTEN_AT_ONCE) == _MAX_FORGOTTEN_AT_ONCE
                    )
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
        return rows, work

    async def _index_answered(self, work: Work) -> None:
        """Enters into the indexes what an answered batch brought."""
        while not work.index_step():  # noqa: ASYNC110  # not a wait: others get their turn
            await asyncio.sleep(0)

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
        """Sees to it that texts are indexed that nobody waits for."""
        if self._state is not _State.SERVING or not self._drafting.is_behind:
            return
        if self._indexing is None or self._indexing.done():
            self._indexing = asyncio.create_task(self._index())

    async def _index(self) -> None:
        """Indexes step by step; whatever else there is to do comes first."""
        while self._drafting.is_behind:
            await self._turns.rest()
            self._drafting.index_step()

    async def _release(self, releases: Iterable[drafter_pb2.Release], turn: Turn) -> None:
        for release in releases:
            if turn.is_over:
                await turn.pause()
            keep = wire.keep_from_proto(release.keep)
            self._drafting.release(release.sequence_id, keep, release.feed_id)

    def _warn_of_unsupported_keep(self, releases: Iterable[drafter_pb2.Release]) -> bool:
        """Says in the log that a release wants its text kept in a way that only newer clients know.

        A release on a stream has no answer that could refuse it, and one finished sequence must
        not end the stream of all others. It is forgotten like any other.
        """
        unsupported = wire.find_unsupported_keep(releases)
        if unsupported is None:
            return False
        field, value = unsupported
        self._logger.warning("release_keeps_nothing", field=field, value=value)
        return True

    def _check_serving(self) -> None:
        if self._state is not _State.SERVING:
            raise NotServingError(self._state.value)


def _refuse_unsupported_keep(releases: Iterable[drafter_pb2.Release]) -> None:
    unsupported = wire.find_unsupported_keep(releases)
    if unsupported is not None:
        field, value = unsupported
        raise UnsupportedFieldError(field, f"this server does not know {value}")
