"""Bounds on the calls and requests of a server, for any service."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servicekit.channel import open_channel
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.errors import retry_after_ms
from servicekit.interceptors.bounds import MAX_RECEIVED_AT_ONCE, MAX_RECEIVED_PER_CONNECTION

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


@pytest.mark.parametrize("shape", ONE_REQUEST)
async def test_only_so_many_requests_are_received_at_a_time(start_server: Any, shape: str) -> None:
    method = WaitingMethod()
    method.may_answer.set()
    running = await start_server({shape: getattr(method, shape)})
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as stack:
        silent, channels = [], []
        for i in range(MAX_RECEIVED_AT_ONCE // MAX_RECEIVED_PER_CONNECTION):
            # gRPC shares a connection between channels of equal options.
            own = [("test.channel", i)]
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(running.server.address, options=own)
            )
            begin = calls_on(channel, shape.replace("unary_", "stream_", 1))
            silent += [begin() for _ in range(MAX_RECEIVED_PER_CONNECTION)]
            channels.append(channel)
        await asyncio.gather(*(each.wait_for_connection() for each in silent))
        await asyncio.gather(*map(all_have_come, channels))
        late = running.method(shape)(StringValue(value="late"))
        await nothing_is_begun(method, running.channel)
        silent.pop().cancel()
        assert await answer_of(late) == "late!"
        for each in silent:
            each.cancel()


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


async def test_reflection_can_be_switched_off(start_server: Any) -> None:
    running = await start_server({}, options=ServerOptions(reflection=False))
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.ServerReflectionInfo(iter([request]))]
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
