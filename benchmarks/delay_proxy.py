"""A process before a drafter that answers late.

    python -m benchmarks.delay_proxy --to HOST:PORT

Forwards every call's messages byte for byte, without metadata, and each message of ProposeStream's
answers a fixed time after it came: later messages do not wait for earlier ones, as on a long wire.
`set_delay` sets that time, also for streams that are open. It is 0 at first; then the proxy only
costs a hop of its own.
"""

import argparse
import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

_SET_DELAY = "/tandem.benchmarks.DelayProxy/SetDelay"
_DELAYED = "/tandem.v1.DrafterService/ProposeStream"

_Stream = grpc.aio.StreamStreamCall[bytes, bytes]


async def set_delay(channel: grpc.aio.Channel, delay_s: float) -> None:
    """Sets the delay of the proxy at the channel's end."""
    request = round(delay_s * 1e9).to_bytes(8, "little")
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_SET_DELAY)
    await call(request, wait_for_ready=True)


class DelayProxy(grpc.GenericRpcHandler):
    """Handles every method: on the wire, a unary call is a stream of one message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.delay_s = 0.0
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        if method == _SET_DELAY:
            return grpc.unary_unary_rpc_method_handler(self._set_delay)

        async def forward(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            upstream: _Stream = self._channel.stream_stream(method)(wait_for_ready=True)
            writing = asyncio.create_task(_write(requests, upstream))
            line = _Line()
            reading = asyncio.create_task(self._read(upstream, line, method == _DELAYED))
            try:
                while (answer := await line.received.get()) is not None:
                    yield answer
                await reading
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            finally:
                line.close()
                upstream.cancel()
                writing.cancel()
                reading.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _read(self, upstream: _Stream, line: "_Line", is_delayed: bool) -> None:
        try:
            async for answer in upstream:
                line.send(answer, self.delay_s if is_delayed else 0.0)
        finally:
            line.send(None, 0.0)

    async def _set_delay(self, request: bytes, _: Any) -> bytes:
        self.delay_s = int.from_bytes(request, "little") / 1e9
        return b""


class _Line:
    """Messages in flight: each comes out a given time after it went in, in order.

    A thread keeps the time, since an event loop's timers count whole milliseconds.
    """

    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._flying: queue.SimpleQueue[tuple[float, bytes | None] | None] = queue.SimpleQueue()
        self._num_flying = 0
        self._thread = threading.Thread(target=self._deliver, name="line", daemon=True)
        self._thread.start()

    def send(self, message: bytes | None, delay_s: float) -> None:
        """None ends the stream, after everything in flight."""
        if delay_s == 0.0 and self._num_flying == 0:
            self.received.put_nowait(message)
            return
        self._num_flying += 1
        self._flying.put((time.monotonic() + delay_s, message))

    def close(self) -> None:
        self._flying.put(None)

    def _deliver(self) -> None:
        while (item := self._flying.get()) is not None:
            due_s, message = item
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._loop.call_soon_threadsafe(self._arrive, message)

    def _arrive(self, message: bytes | None) -> None:
        self._num_flying -= 1
        self.received.put_nowait(message)


async def _write(requests: AsyncIterator[bytes], upstream: _Stream) -> None:
    async for request in requests:
        await upstream.write(request)
    await upstream.done_writing()


async def serve(to: str) -> None:
    """Prints its address, and serves until it is stopped."""
    async with grpc.aio.insecure_channel(to) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([DelayProxy(channel)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"ready grpc=127.0.0.1:{port}", flush=True)
        await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", required=True, help="the drafter's address")
    # Whoever starts services gives more flags, which mean nothing here.
    arguments, _ = parser.parse_known_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(arguments.to))
    else:
        uvloop.run(serve(arguments.to))


if __name__ == "__main__":
    main()
