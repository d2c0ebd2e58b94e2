"""One bidirectional stream to one peer, kept open for ever.

Owns connecting, one reader, one writer and reconnecting. Knows no message: the peer's handler
does. Each step's messages pass through here, so there is no queue and no task per message: the
reader calls the handler, the handler merges what is to be said and wakes the writer, the writer
asks it for the next message. What bounds it: one message being written, one being read.

    connecting --greet--> up --any error--> down, pause, connecting ...
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import grpc

from gateway.peers.backoff import Backoff
from servicekit.logs import Logger

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Call = grpc.aio.StreamStreamCall[RequestT, ResponseT]


class PeerError(Exception):
    """The peer does not keep to the protocol, or not to the time; the stream is given up."""


class PeerHandler(Protocol[RequestT, ResponseT]):
    """What a link knows of its messages. Called on the event loop; nothing here may block."""

    async def greet(self, call: Call[RequestT, ResponseT]) -> None:
        """Does the exchange that proves that the peer is there; time-limited."""

    def on_up(self) -> None:
        """The peer has answered the greeting; messages flow from now on."""

    def next_request(self) -> RequestT | None:
        """Returns the next message to write; None: nothing to say until `PeerStream.wake`."""

    def on_response(self, response: ResponseT) -> None:
        """Takes a message.

        Raises:
            PeerError: the stream is not worth going on with.
        """

    def on_down(self) -> None:
        """The stream that was up is gone; why is logged."""


class PeerStream(Generic[RequestT, ResponseT]):
    """Keeps one stream to one peer; `run` is its only task, and cancelling that ends it."""

    def __init__(
        self,
        *,
        open_call: Callable[[], Call[RequestT, ResponseT]],
        handler: PeerHandler[RequestT, ResponseT],
        greet_timeout_s: float,
        count_mistake: Callable[[Exception], None],
        logger: Logger,
    ) -> None:
        """Prepares; `run` connects.

        Args:
            open_call: starts the RPC; it may wait for the channel to be ready.
            greet_timeout_s: how long connecting and greeting may take together.
            count_mistake: told of errors that are no peer's doing.
            logger: bound to the peer's name.
        """
        self._open_call = open_call
        self._handler = handler
        self._greet_timeout_s = greet_timeout_s
        self._count_mistake = count_mistake
        self._logger = logger
        self._something_to_say = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        self._is_away = False

    def wake(self) -> None:
        """There is something to say."""
        self._something_to_say.set()

    def fail(self, error: PeerError) -> None:
        """Gives the current stream up, if one is up."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def run(self) -> None:
        """Connects, talks, and connects again, until cancelled."""
        backoff = Backoff()
        while True:
            lasted_s = 0.0
            try:
                lasted_s = await self._run_once()
            except Exception as error:
                # In opening or ending a stream; the next one may do better.
                self._on_mistake(error)
            await asyncio.sleep(backoff.next_pause_s(lasted_s))

    async def _run_once(self) -> float:
        """One stream from its start to its end; returns for how long it was up."""
        loop = asyncio.get_running_loop()
        up_since_s: float | None = None
        reason = ""
        call = self._open_call()
        try:
            async with asyncio.timeout(self._greet_timeout_s):
                await self._handler.greet(call)
            up_since_s = loop.time()
            self._logger.info("peer_up")
            self._handler.on_up()
            await self._exchange(call)
            reason = "the peer ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except PeerError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer within {self._greet_timeout_s} s"
        except asyncio.InvalidStateError:
            reason = "the stream ended while a message was being written"
        except Exception as error:
            # A mistake of ours must not cost more than this one stream; it is not hidden either.
            self._on_mistake(error)
            reason = "internal error"
        finally:
            # Without this an abandoned call lives on in gRPC, and so does its handler at the peer.
            call.cancel()
            if up_since_s is not None:
                # Also when cancelled: whoever relies on this peer must hear of it.
                self._handler.on_down()
        if up_since_s is None:
            # Once is enough to be told of a peer that stays away.
            log = self._logger.debug if self._is_away else self._logger.warning
            log("peer_unreachable", reason=reason)
            self._is_away = True
            return 0.0
        self._is_away = False
        self._logger.warning("peer_down", reason=reason)
        return loop.time() - up_since_s

    def _on_mistake(self, error: Exception) -> None:
        self._logger.error("peer_stream_failed", exc_info=error)
        self._count_mistake(error)

    async def _exchange(self, call: Call[RequestT, ResponseT]) -> None:
        """Reads and writes until one of the two ends, or `fail` is called."""
        self._failure = asyncio.get_running_loop().create_future()
        self._something_to_say.set()
        tasks: set[asyncio.Future[None]] = {
            asyncio.ensure_future(self._read(call)),
            asyncio.ensure_future(self._write(call)),
        }
        try:
            done, _ = await asyncio.wait(
                {*tasks, self._failure}, return_when=asyncio.FIRST_COMPLETED
            )
            # All are looked at: one whose error nobody fetches complains when it is collected.
            errors = [future.exception() for future in done]
            for error in errors:
                if error is not None:
                    raise error
        finally:
            self._failure.cancel()
            self._failure = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Call[RequestT, ResponseT]) -> None:
        on_response = self._handler.on_response
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                return
            on_response(cast(ResponseT, response))

    async def _write(self, call: Call[RequestT, ResponseT]) -> None:
        next_request = self._handler.next_request
        while True:
            request = next_request()
            if request is not None:
                await call.write(request)
                continue
            self._something_to_say.clear()
            await self._something_to_say.wait()
