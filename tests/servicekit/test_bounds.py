"""Bounds on the calls and requests of a server, for any service."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.errors import retry_after_ms
from servicekit.interceptors import bounds
from servicekit.interceptors.bounds import (
    MAX_HEALTH_RECEIVED_AT_ONCE,
    MAX_RECEIVED_AT_ONCE,
    MAX_RECEIVED_PER_CALLER,
    MAX_RECEIVED_PER_CONNECTION,
)
from tests.servicekit.window_filler import bytes_taken

ONE_REQUEST = ["unary_unary", "unary_stream"]


class WaitingMethod:
    """A method that answers once `may_answer` is set."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.begun = asyncio.Condition()
        self.may_answer = asyncio.Event()

    async def unary_unary(self, request: StringValue, _context: Any) -> StringValue:
        async with self.begun:
            self.num_begun += 1
            self.begun.notify_all()
        await self.may_answer.wait()
        return StringValue(value=f"{request.value}!")

    async def unary_stream(self, request: StringValue, context: Any) -> Any:
        yield await self.unary_unary(request, context)

    async def until_begun(self, num_calls: int) -> None:
        async with asyncio.timeout(20), self.begun:
            await self.begun.wait_for(lambda: self.num_begun >= num_calls)


async def answer_of(ongoing: Any) -> str:
    if hasattr(ongoing, "read"):
        return str((await ongoing.read()).value)
    return str((await ongoing).value)


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_calls_beyond_the_bound_are_refused_but_not_health_checks(
    start_server: Any, shape: str
) -> None:
    method = WaitingMethod()
    running = await start_server(
        {shape: getattr(method, shape)}, options=ServerOptions(max_concurrent_calls=2)
    )
    ongoing = [running.method(shape)(StringValue(value="a")) for _ in range(2)]
    await method.until_begun(2)
    # The bound is on the calls of all connections together.
    async with open_channel(running.server.address, ChannelOptions()) as other:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(
                getattr(other, shape)(
                    "/test.v1.EchoService/Echo", response_deserializer=StringValue.FromString
                )(StringValue(value="b").SerializeToString())
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_ms(caught.value) == 1000
        assert running.num_requests("RESOURCE_EXHAUSTED") == 1
        health = health_pb2_grpc.HealthStub(other)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
    method.may_answer.set()
    assert [await answer_of(each) for each in ongoing] == ["a!", "a!"]
    await running.counted("OK")
    assert await answer_of(running.method(shape)(StringValue(value="c"))) == "c!"


async def nothing_is_begun(method: WaitingMethod, channel: grpc.aio.Channel) -> None:
    """Checks that no call has begun: one would have, while 50 health checks are answered."""
    health = health_pb2_grpc.HealthStub(channel)
    for _ in range(50):
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
    assert method.num_begun == 0


async def all_have_come(channel: grpc.aio.Channel) -> None:
    """Returns when the server has seen every call that was begun on this connection.

    A later call on the same connection arrives after them.
    """
    assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


def calls_on(channel: grpc.aio.Channel, shape: str) -> Any:
    """The method of that shape over this channel."""
    return getattr(channel, shape)(
        "/test.v1.EchoService/Echo",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_requests_that_a_connection_does_not_send_hold_up_only_itself(
    start_server: Any, shape: str
) -> None:
    method = WaitingMethod()
    method.may_answer.set()
    running = await start_server({shape: getattr(method, shape)})
    # Calls that announce a request and do not send it.
    begin = running.method(shape.replace("unary_", "stream_", 1))
    silent = [begin() for _ in range(MAX_RECEIVED_PER_CONNECTION)]
    async with asyncio.timeout(20):
        await asyncio.gather(*(each.wait_for_connection() for each in silent))
        await all_have_come(running.channel)
        late = running.method(shape)(StringValue(value="late"))
        await nothing_is_begun(method, running.channel)
        async with open_channel(running.server.address, ChannelOptions()) as other:
            assert await answer_of(calls_on(other, shape)(StringValue(value="b"))) == "b!"
        silent.pop().cancel()
        assert await answer_of(late) == "late!"
        # A call whose request arrives late is answered.
        await silent[0].write(StringValue(value="at last"))
        await silent[0].done_writing()
        assert await answer_of(silent[0]) == "at last!"
    for each in silent:
        each.cancel()


class SilentCallers:
    """Callers whose calls announce a request and do not send it, on connections of their own."""

    def __init__(self, address: str, shape: str, stack: contextlib.AsyncExitStack) -> None:
        self.calls: list[Any] = []
        self._address = address
        self._shape = shape
        self._stack = stack
        self._num_connections = 0

    async def connect(self) -> grpc.aio.Channel:
        # gRPC shares a connection between channels of equal options.
        self._num_connections += 1
        return await self._stack.enter_async_context(
            grpc.aio.insecure_channel(
                self._address, options=[("test.channel", self._num_connections)]
            )
        )

    async def announce(self, num_calls: int, token: str) -> None:
        """As many calls of one caller, over as many connections as they need."""
        while num_calls > 0:
            channel = await self.connect()
            begin = calls_on(channel, self._shape.replace("unary_", "stream_", 1))
            calls = [
                begin(metadata=bearer(token))
                for _ in range(min(num_calls, MAX_RECEIVED_PER_CONNECTION))
            ]
            await asyncio.gather(*(each.wait_for_connection() for each in calls))
            await all_have_come(channel)
            self.calls += calls
            num_calls -= len(calls)

    def leave(self) -> None:
        for each in self.calls:
            each.cancel()


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


@pytest.mark.parametrize("shape", ONE_REQUEST[:1])
async def test_only_so_many_requests_are_received_at_a_time(start_server: Any, shape: str) -> None:
    method = WaitingMethod()
    method.may_answer.set()
    running = await start_server({shape: getattr(method, shape)}, admit=lambda caller: None)
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        silent = SilentCallers(running.server.address, shape, stack)
        for index in range(MAX_RECEIVED_AT_ONCE // MAX_RECEIVED_PER_CALLER):
            await silent.announce(MAX_RECEIVED_PER_CALLER, f"caller {index}")
        late = running.method(shape)(StringValue(value="late"))
        await nothing_is_begun(method, running.channel)
        silent.calls.pop().cancel()
        assert await answer_of(late) == "late!"
        silent.leave()


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_a_caller_with_many_connections_holds_up_only_itself(
    start_server: Any, shape: str
) -> None:
    method = WaitingMethod()
    method.may_answer.set()
    running = await start_server({shape: getattr(method, shape)}, admit=lambda caller: None)
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        silent = SilentCallers(running.server.address, shape, stack)
        await silent.announce(MAX_RECEIVED_AT_ONCE, "silent")
        late = calls_on(await silent.connect(), shape)(
            StringValue(value="late"), metadata=bearer("silent")
        )
        await nothing_is_begun(method, running.channel)
        other = running.method(shape)(StringValue(value="b"), metadata=bearer("other"))
        assert await answer_of(other) == "b!"
        silent.leave()
        assert await answer_of(late) == "late!"


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_a_caller_leaves_room_for_the_calls_of_others(start_server: Any, shape: str) -> None:
    method = WaitingMethod()
    running = await start_server(
        {shape: getattr(method, shape)},
        options=ServerOptions(max_concurrent_calls=10),
        admit=lambda caller: None,
    )
    greedy = bearer("greedy")
    ongoing = [running.method(shape)(StringValue(value="a"), metadata=greedy) for _ in range(8)]
    async with asyncio.timeout(20):
        await method.until_begun(8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(running.method(shape)(StringValue(value="b"), metadata=greedy))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "8 calls of this caller are in flight, its share"
        assert retry_after_ms(caught.value) == 1000
        other = running.method(shape)(StringValue(value="b"), metadata=bearer("other"))
        await method.until_begun(9)
        method.may_answer.set()
        assert await answer_of(other) == "b!"
        for each in ongoing:
            await answer_of(each)
        # Its share is free again.
        await answer_of(running.method(shape)(StringValue(value="b"), metadata=greedy))


async def test_of_callers_and_connections_that_are_gone_nothing_is_left() -> None:
    method = WaitingMethod()
    method.may_answer.set()
    interceptor = bounds.BoundsInterceptor(10, 5.0, knows_tokens=True)
    server = grpc.aio.server(interceptors=[interceptor])
    handler = grpc.unary_unary_rpc_method_handler(
        method.unary_unary, StringValue.FromString, StringValue.SerializeToString
    )
    server.add_registered_method_handlers("test.v1.EchoService", {"Echo": handler})
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for name in ("one", "two"):
        async with open_channel(address, ChannelOptions()) as channel:
            echo = calls_on(channel, "unary_unary")
            assert await echo(StringValue(value="a"), metadata=bearer(name)) == StringValue(
                value="a!"
            )
    await server.stop(None)
    assert not interceptor._num_calls_of
    assert not interceptor._receiving_of


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_a_request_that_does_not_come_ends_its_call(start_server: Any, shape: str) -> None:
    method = WaitingMethod()
    method.may_answer.set()
    running = await start_server(
        {shape: getattr(method, shape)}, options=ServerOptions(request_timeout_s=1.0)
    )
    begin = running.method(shape.replace("unary_", "stream_", 1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_of(begin())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    empty = begin()
    await empty.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_of(empty)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert method.num_begun == 0


@pytest.mark.parametrize(
    "method",
    [
        "/test.v1.EchoService/Echo",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_of_requests_that_are_not_read_a_window_is_taken(
    start_server: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of them is late before the end.
    monkeypatch.setattr(bounds, "HEALTH_TIMEOUT_S", 60.0)
    echo = WaitingMethod()
    running = await start_server({"unary_unary": echo.unary_unary})
    num_calls, message_bytes = 64, 4 << 20
    # A server whose windows grew took all of it.
    bound = MAX_RECEIVED_PER_CONNECTION * message_bytes + num_calls * (64 << 10)
    taken = await bytes_taken(
        running.server.address,
        method,
        num_calls=num_calls,
        message_bytes=message_bytes,
        enough=bound,
        quiet_s=0.5,
    )
    assert taken <= bound
    # Sometimes gRPC stops at five sixths of the calls' first windows.
    assert taken >= message_bytes // 2, "what is read is taken"


async def test_health_checks_that_do_not_come_hold_up_no_others(start_server: Any) -> None:
    running = await start_server({})
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        silent: list[Any] = []
        for index in range(12):
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(running.server.address, options=[("test.channel", index)])
            )
            begin: Any = channel.stream_unary("/grpc.health.v1.Health/Check")
            silent += [begin() for _ in range(MAX_RECEIVED_PER_CONNECTION)]
            # Some have ended.
            connecting = (each.wait_for_connection() for each in silent)
            await asyncio.gather(*connecting, return_exceptions=True)
        stub = health_pb2_grpc.HealthStub(running.channel)
        started_s = asyncio.get_running_loop().time()
        for _ in range(20):
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status
        assert asyncio.get_running_loop().time() < started_s + bounds.HEALTH_TIMEOUT_S
        # The longest silent ones first: a request that is on its way has its time.
        assert all(each.done() for each in silent[:MAX_RECEIVED_PER_CONNECTION])
        ended = [each for each in silent if each.done()]
        assert len(ended) >= len(silent) - MAX_HEALTH_RECEIVED_AT_ONCE
        assert {await each.code() for each in ended} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        for each in silent:
            each.cancel()


async def test_there_are_so_many_watches(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_WATCHES", 2)
    running = await start_server({})
    stub = health_pb2_grpc.HealthStub(running.channel)
    request = health_pb2.HealthCheckRequest()
    async with asyncio.timeout(20):
        watches = [stub.Watch(request) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(request).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request)).status, "checks are answered"
        for watch in watches:
            watch.cancel()
        # Those that have ended make room.
        while True:
            watch = stub.Watch(request)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await watch.read()).status
                break
        watch.cancel()
