"""The DrafterService RPCs: requests to the engine and back.

Owns the life of streams. A stream has one request in flight: the next is read after the last was
answered and handed to the transport. A client that leaves its answers unread, so that the transport
accepts no more, is disconnected. How batches are answered is known to `drafter.batch`.
"""

import asyncio
import enum
from collections.abc import AsyncIterator, Iterable, Sequence

import grpc

from drafter.batch import wire
from drafter.batch.batch import Batch
from drafter.batch.engine import DraftEngine
from drafter.budgets import FORGOTTEN_AT_ONCE, SWEEP_INTERVAL_S
from drafter.errors import NotServingError, UnreadAnswersError, UnsupportedFieldError
from drafter.metrics import DrafterMetrics
from drafter.refusals import Failure
from servicekit.errors import MalformedRequestError
from servicekit.logs import Logger
from servicekit.serving.client_waits import ClientWaits
from tandem.v1 import drafter_pb2, drafter_pb2_grpc

SERVICE_NAME = "tandem.v1.DrafterService"
STREAM_METHOD = "ProposeStream"

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
    """Answers batches. Owned by the event loop; refuses all of them until `open`.

    Attributes:
        engine: how they are answered.
        streams: those that are open.
    """

    def __init__(
        self,
        engine: DraftEngine,
        *,
        metrics: DrafterMetrics,
        instance_id: str,
        logger: Logger,
        unread_timeout_s: float,
    ) -> None:
        """Wires it up.

        Args:
            engine: answers batches.
            metrics: what failures are counted in.
            instance_id: made at start.
            logger: for what no client is told.
            unread_timeout_s: how long a stream may leave an answer unread.
        """
        self.engine = engine
        self._store = engine.store
        self.streams = ClientWaits(
            unread_timeout_s=unread_timeout_s,
            make_unread_error=lambda: UnreadAnswersError(unread_timeout_s),
        )
        self._instance_id = instance_id
        self._metrics = metrics
        self._logger = logger
        self._state = _State.STARTING

    def open(self) -> None:
        """Begins to take requests: everything is compiled, and pools are restored."""
        self._state = _State.SERVING

    async def drain(self) -> None:
        """Answers requests that were read, then ends all streams and the background work."""
        self._state = _State.DRAINING
        self.streams.end_reads(lambda: NotServingError(self._state.value))
        await self.streams.all_closed.wait()
        await self.engine.indexer.close()

    async def sweep_forever(self) -> None:
        """Forgets what expires while no requests come; runs until cancelled."""
        pause_s = SWEEP_INTERVAL_S
        has_failed = False
        while True:
            await asyncio.sleep(pause_s)
            pause_s = SWEEP_INTERVAL_S
            try:
                self.engine.pools.start_work()
                if self._store.forget_expired(FORGOTTEN_AT_ONCE) == FORGOTTEN_AT_ONCE:
                    pause_s = 0.0
            except Exception:
                # A mistake of ours. Requests forget what has expired too, and the next sweep may.
                if not has_failed:
                    self._logger.exception("sweep_failed")
                has_failed = True
                self._metrics.count_failure(Failure.UPKEEP)
            else:
                has_failed = False

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
        wire.check_releases(request.releases)
        _refuse_unsupported_keep(request.releases)
        batch = Batch(request, lease=None)
        response = await self.engine.answer(batch)
        self.engine.finish(batch)
        return response

    async def ProposeStream(  # type: ignore[override]  # bytes, and it writes its responses itself
        self, request_iterator: AsyncIterator[bytes], context: _StreamContext
    ) -> None:
        """Answers batches one after the other, until the client ends the stream or drain does.

        Raises:
            MalformedRequestError: a message is no ProposeRequest.
            NotServingError: the drafter is shutting down.
            UnreadAnswersError: the client does not read them.
        """
        self._check_serving()
        lease = self._store.start_stream()
        has_warned = False
        async with self.streams.open() as stream:
            try:
                while True:
                    self._check_serving()
                    stream.begin_read()
                    payload: object = await context.read()
                    stream.go_on()
                    if not isinstance(payload, bytes):  # the client has ended the stream
                        break
                    request = drafter_pb2.ProposeRequest.FromString(payload)
                    batch = Batch(request, lease)
                    releases = request.releases
                    if releases:
                        has_warned |= self._check_streamed(releases, has_warned=has_warned)
                    response = await self.engine.answer(batch)
                    stream.begin_write()
                    try:
                        await context.write(response.SerializeToString())
                    finally:
                        self.engine.finish(batch)
                    stream.go_on()
                    # A stream may be idle for hours, and a batch holds its texts in memory.
                    del batch
            except wire.DecodeError as error:
                raise MalformedRequestError(f"/{SERVICE_NAME}/{STREAM_METHOD}") from error
            finally:
                self._store.end_stream(lease)

    async def Release(
        self, request: drafter_pb2.ReleaseRequest, context: _ReleaseContext
    ) -> drafter_pb2.ReleaseResponse:
        """Forgets sequences."""
        wire.check_releases(request.releases)
        _refuse_unsupported_keep(request.releases)
        num_kept = await self.engine.release(request.releases)
        return drafter_pb2.ReleaseResponse(num_kept=num_kept)

    async def GetDrafterLoad(
        self, request: drafter_pb2.GetDrafterLoadRequest, context: _LoadContext
    ) -> drafter_pb2.GetDrafterLoadResponse:
        """Says how full this drafter is."""
        self._store.forget_expired(FORGOTTEN_AT_ONCE)
        limits = self._store.limits
        return drafter_pb2.GetDrafterLoadResponse(
            instance_id=self._instance_id,
            num_sequences=self._store.num_sequences,
            max_sequences=limits.max_sequences,
            history_bytes=self._store.history_bytes,
            max_history_bytes=limits.max_history_bytes,
            pool_bytes=self.engine.pools.store.occupied_bytes,
        )

    def _check_streamed(self, releases: Sequence[drafter_pb2.Release], *, has_warned: bool) -> bool:
        """Counts a stream's releases that name no sequence; logs the first that is wrong.

        A release on a stream has no answer that could refuse it, and one finished sequence must
        not end the stream of all others. With a `keep` that only newer clients know it is forgotten
        like any other.

        Returns:
            Whether something was wrong.
        """
        unsupported = wire.find_unsupported_keep(releases)
        if unsupported is not None and not has_warned:
            field, value = unsupported
            self._logger.warning("release_keeps_nothing", field=field, value=value)
        num_nameless = len(releases) - len(wire.named_releases(releases))
        self._metrics.count_failure(Failure.RELEASE, num_nameless)
        if num_nameless and not has_warned:
            self._logger.warning("release_names_no_sequence", num_releases=num_nameless)
        return unsupported is not None or num_nameless > 0

    def _check_serving(self) -> None:
        if self._state is not _State.SERVING:
            raise NotServingError(self._state.value)


def _refuse_unsupported_keep(releases: Iterable[drafter_pb2.Release]) -> None:
    unsupported = wire.find_unsupported_keep(releases)
    if unsupported is not None:
        field, value = unsupported
        raise UnsupportedFieldError(field, f"this server does not know {value}")
