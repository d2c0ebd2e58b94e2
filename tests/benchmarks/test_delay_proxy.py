"""The proxy in front of a server of raw bytes, over real sockets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from benchmarks.delay_proxy import DelayProxy, set_delay

DELAYED = "/tandem.v1.DrafterService/ProposeStream"
OTHER = "/tandem.v1.DrafterService/GetDrafterLoad"
BROKEN = "/tandem.v1.DrafterService/Release"
DELAY_S = 0.2


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _answer(request: bytes, context: Any) -> bytes:
    return request[::-1]


async def _fail(request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such sequence")
    return b""


async def call(channel: grpc.aio.Channel, method: str, request: bytes) -> bytes:
    callable_: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return await callable_(request)


@contextlib.asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.fixture
async def proxy() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a proxy before a server that echoes streams and reverses single messages."""
    service = "tandem.v1.DrafterService"
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ProposeStream": grpc.stream_stream_rpc_method_handler(_echo),
        "GetDrafterLoad": grpc.unary_unary_rpc_method_handler(_answer),
        "Release": grpc.unary_unary_rpc_method_handler(_fail),
    }
    handler = grpc.method_handlers_generic_handler(service, handlers)
    async with serving(handler) as behind, serving(DelayProxy(behind)) as before:
        yield before


async def test_messages_in_flight_do_not_wait_for_each_other(proxy: grpc.aio.Channel) -> None:
    await set_delay(proxy, DELAY_S)
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = proxy.stream_stream(DELAYED)()
    messages = [bytes([i]) for i in range(20)]
    started_at_s = time.monotonic()
    for message in messages:
        await stream.write(message)
    answers = [await stream.read()]
    first_s = time.monotonic() - started_at_s
    while len(answers) < len(messages):
        answers.append(await stream.read())
    all_s = time.monotonic() - started_at_s
    stream.cancel()
    assert answers == messages
    assert first_s >= DELAY_S
    assert all_s < len(messages) * DELAY_S


async def test_a_new_delay_holds_for_open_streams(proxy: grpc.aio.Channel) -> None:
    await set_delay(proxy, 60.0)
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = proxy.stream_stream(DELAYED)()
    took_s = []
    for delay_s in (0.0, DELAY_S):
        await set_delay(proxy, delay_s)
        started_at_s = time.monotonic()
        await stream.write(b"x")
        assert await stream.read() == b"x"
        took_s.append(time.monotonic() - started_at_s)
    stream.cancel()
    assert took_s[0] < 60.0
    assert DELAY_S <= took_s[1] < 60.0


async def test_the_streams_end_comes_through(proxy: grpc.aio.Channel) -> None:
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = proxy.stream_stream(DELAYED)()
    await stream.write(b"last")
    await stream.done_writing()
    assert [answer async for answer in stream] == [b"last"]
    assert await stream.code() is grpc.StatusCode.OK


async def test_other_calls_and_errors_come_through_without_delay(proxy: grpc.aio.Channel) -> None:
    await set_delay(proxy, 60.0)
    async with asyncio.timeout(30):
        assert await call(proxy, OTHER, b"abc") == b"cba"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(proxy, BROKEN, b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "no such sequence"
