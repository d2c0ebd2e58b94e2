"""One bidirectional stream to one peer, kept open for ever.

Owns connecting, one reader, one writer and reconnecting. Knows no message: the peer's handler
does. Each step's messages pass through here, so there is no queue and no task per message: the
reader calls the handler, the handler merges what is to be sent and wakes the writer, the writer
asks it for the next message. It holds one message being written and one being read.

    connecting --greet--> up --any error--> down, connecting ...

A stream waits until its channel is connected: gRPC's backoff paces the connections
(`channel.py`), and a stream that broke while it was up is replaced at once. Only a peer
that accepts connections and ends streams early is paced here.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import grpc

from servicekit.logs import Logger

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Call = grpc.aio.StreamStreamCall[RequestT, ResponseT]

# Of a peer that keeps coming and going, so many lines are logged at their level within an interval,
# in seconds.
_MAX_LINES = 10
_LINES_INTERVAL_S = 60.0

# Of a connection that is being tried, how long its failure is awaited, to be told.
_FAILURE_TIMEOUT_S = 1.0

# From the beginning of a stream to that of the next, at least half of this and on average 3/4.
_STREAM_INTERVAL_S = 1.0


class PeerError(Exception):
    """The peer violates the protocol, or answers too late; its stream ends."""


class PeerHandler(Protocol[RequestT, ResponseT]):
    """The link that knows the messages. Called on the event loop; nothing here may block."""

    async def greet(self, call: Call[RequestT, ResponseT]) -> None:
        """Exchanges messages that prove that the peer answers; within a time limit."""

    def on_up(self) -> None:
        """The peer has answered; messages flow from now on."""

    def next_request(self) -> RequestT | None:
        """Returns the next message to write; None if there is none until `PeerStream.wake`."""

    def on_response(self, response: ResponseT) -> None:
        """Handles a message.

        Raises:
            PeerError: the stream must end.
        """

    def on_down(self, reason: str) -> None:
        """The stream that was up has ended; the reason is logged."""

    def on_unreachable(self, reason: str) -> None:
        """A stream could not be begun; another attempt follows."""


class OpenCall(Protocol[RequestT, ResponseT]):
    """Starts the RPC, as a stub's method does."""

    def __call__(self, *, wait_for_ready: bool) -> Call[RequestT, ResponseT]: ...


class PeerStream(Generic[RequestT, ResponseT]):
    """Keeps one stream to one peer; `run` is its only task, and cancelling that ends it."""

    def __init__(
        self,
        *,
        channel: grpc.aio.Channel,
        open_call: OpenCall[RequestT, ResponseT],
        handler: PeerHandler[RequestT, ResponseT],
        greet_timeout_s: float,
        on_internal_error: Callable[[Exception], None],
        logger: Logger,
    ) -> None:
        """Prepares; `run` connects.

        Args:
            channel: that of the calls.
            open_call: starts the RPC on it.
            greet_timeout_s: how long connecting and greeting may take together.
            on_internal_error: called with errors that no peer caused.
            logger: bound to the peer's name.
        """
        self._channel = channel
        self._open_call = open_call
        self._handler = handler
        self._greet_timeout_s = greet_timeout_s
        self._on_internal_error = on_internal_error
        self._logger = logger
        self._has_request = asyncio.Event()
        self._failure: asyncio.Future[None] | None = None
        self._is_away = False
        # When an interval of lines is over; the lines in it, and those left out since the last one.
        self._lines_until_s = 0.0
        self._num_lines = 0
        self._num_unlogged = 0

    def wake(self) -> None:
        """There is a message to write."""
        self._has_request.set()

    def fail(self, error: PeerError) -> None:
        """Ends the current stream, if one is up."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def run(self) -> None:
        """Keeps beginning streams, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            next_s = loop.time() + _STREAM_INTERVAL_S * random.uniform(0.5, 1)
            try:
                await self._run_once()
            except Exception as error:
                # In opening or ending a stream; the next one may succeed.
                self._report(error)
            await asyncio.sleep(next_s - loop.time())

    async def _run_once(self) -> None:
        """One stream from its beginning to its end."""
        is_up = False
        reason = ""
        call = self._open_call(wait_for_ready=True)
        try:
            async with asyncio.timeout(self._greet_timeout_s):
                await self._handler.greet(call)
            is_up = True
            self._log(self._logger.info, "peer_up")
            self._handler.on_up()
            await self._exchange(call)
            reason = "the peer ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except PeerError as error:
            reason = str(error)
        except TimeoutError:
            reason = await self._why_late()
        except asyncio.InvalidStateError:
            reason = "the stream ended while a message was being written"
        except Exception as error:
            # A bug of this service ends this one stream, and is not hidden.
            self._report(error)
            reason = "internal error"
        finally:
            # An abandoned call would live on in gRPC, and its handler at the peer.
            call.cancel()
            if is_up:
                # Also when cancelled: the handler's listener relies on it.
                self._handler.on_down(reason or "this service ended the stream")
        if is_up:
            self._log(self._logger.warning, "peer_down", reason=reason)
        else:
            # One warning per absence.
            log = self._logger.debug if self._is_away else self._logger.warning
            log("peer_unreachable", reason=reason)
            self._handler.on_unreachable(reason)
        self._is_away = not is_up

    async def _why_late(self) -> str:
        """Why the peer was not up in time."""
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            return f"no answer within {self._greet_timeout_s} s"
        reason = f"not connected within {self._greet_timeout_s} s"
        # gRPC says why only to a call that does not wait.
        call = self._open_call(wait_for_ready=False)
        try:
            async with asyncio.timeout(_FAILURE_TIMEOUT_S):
                details = await call.details()
        except TimeoutError:
            return reason
        finally:
            call.cancel()
        return f"{reason}, {details}: check the address, that it runs, and --peer-tls-*"

    def _log(self, log: Callable[..., object], event: str, **fields: object) -> None:
        """Logs that the peer came or went, unless there are too many such lines."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._lines_until_s:
            self._lines_until_s = now_s + _LINES_INTERVAL_S
            self._num_lines = 0
        self._num_lines += 1
        if self._num_lines > _MAX_LINES:
            self._num_unlogged += 1
            log = self._logger.debug
        elif self._num_unlogged:
            fields["num_unlogged"] = self._num_unlogged
            self._num_unlogged = 0
        log(event, **fields)

    def _report(self, error: Exception) -> None:
        self._logger.error("peer_stream_failed", exc_info=error)
        self._on_internal_error(error)

    async def _exchange(self, call: Call[RequestT, ResponseT]) -> None:
        """Reads and writes until one of the two ends, or `fail` is called."""
        self._failure = asyncio.get_running_loop().create_future()
        self._has_request.set()
        tasks: set[asyncio.Future[None]] = {
            asyncio.ensure_future(self._read(call)),
            asyncio.ensure_future(self._write(call)),
        }
        try:
            done, _ = await asyncio.wait(
                {*tasks, self._failure}, return_when=asyncio.FIRST_COMPLETED
            )
            # Fetches every error: asyncio logs those that nobody fetches.
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
            self._has_request.clear()
            await self._has_request.wait()
