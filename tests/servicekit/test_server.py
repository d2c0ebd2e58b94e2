"""A server in this process: binding its ports, what it offers, its limits."""

import asyncio
import contextlib
import gc
import itertools
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

import servicekit.serving.server
from servicekit.channels.channel import open_channel
from servicekit.channels.limits import MAX_MESSAGE_BYTES, MAX_RECEIVE_BYTES
from servicekit.config import ChannelOptions, ConfigError
from servicekit.serving.server import Server
from tests.servicekit.factories import call, check_health, make_server


@contextlib.asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Server]:
    server = make_server(**options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_every_port_of_a_wildcard_address_serves_ipv4_and_ipv6(host: str) -> None:
    async with started(
        listen=f"{host}:0", metrics_listen=f"{host}:0", health_listen=f"{host}:0",
        allow_plaintext=True,
    ) as server:  # fmt: skip
        for address in (server.address, server.metrics_address, server.health_address):
            assert address is not None
            port = int(address.rpartition(":")[2])
            for loopback in ("127.0.0.1", "::1"):
                socket.create_connection((loopback, port), timeout=20).close()


@pytest.mark.parametrize("key", ["listen", "health_listen", "metrics_listen"])
async def test_a_taken_port_is_an_error_that_names_the_flag(key: str) -> None:
    async with started(health_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0") as other:
        addresses = {
            "listen": other.address,
            "health_listen": other.health_address,
            "metrics_listen": other.metrics_address,
        }
        taken: dict[str, Any] = {key: addresses[key]}
        server = make_server(**taken)
        with pytest.raises(ConfigError) as caught:
            await server.start()
        assert caught.value.key == "--" + key.replace("_", "-")
        assert caught.value.message == f"cannot listen on {addresses[key]}: Address already in use"


async def test_nobody_can_share_the_port() -> None:
    async with started() as server:
        with socket.socket() as sharer:
            sharer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                sharer.bind(("127.0.0.1", int(server.address.rpartition(":")[2])))


async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing_behind() -> None:
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    for turns in itertools.count():
        server = make_server(health_listen="127.0.0.1:0")
        starting = asyncio.create_task(server.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not starting.cancel():
            break
        with pytest.raises(asyncio.CancelledError):
            await starting
        if turns:  # else it had not begun
            async with started(listen=server.address, health_listen=server.health_address) as again:
                status = await check_health(again.address)
                assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)
    assert turns > 3
    gc.collect()  # a task that failed is reported when it is collected
    assert failures == []


async def test_a_stopped_server_frees_its_ports_at_once_and_stops_twice() -> None:
    async with started(health_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0") as server:
        options = {
            "listen": server.address,
            "health_listen": server.health_address,
            "metrics_listen": server.metrics_address,
        }
        await server.stop(0)
        async with started(**options) as again:
            assert again.address == options["listen"]


async def test_the_health_port_carries_health_and_nothing_else() -> None:
    async with started(health_listen="127.0.0.1:0") as server:
        assert server.health_address is not None
        assert (
            await check_health(server.health_address) == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        server.set_serving()
        assert await check_health(server.health_address) == health_pb2.HealthCheckResponse.SERVING
        async with open_channel(server.health_address, ChannelOptions()) as channel:
            for method in (
                "/test.v1.EchoService/Echo",
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, method)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="x" * 5_000))
            # Anybody may call, so nothing large is received.
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_messages_up_to_the_limit_arrive_and_longer_ones_are_refused(
    start_server: Any,
) -> None:
    async def echo(request: StringValue, _context: Any) -> StringValue:
        return StringValue(value=str(len(request.value)))

    running = await start_server({"unary_unary": echo})
    # A service must receive messages over its own limit, to refuse them with a field's name.
    for num_bytes in (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1000):
        response = await running.method("unary_unary")(StringValue(value="x" * num_bytes))
        assert response.value == str(num_bytes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.method("unary_unary")(StringValue(value="x" * MAX_RECEIVE_BYTES))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await running.method("unary_unary")(StringValue(value="x"))).value == "1"


async def test_a_client_takes_responses_up_to_the_limit(start_server: Any) -> None:
    async def grow(request: StringValue, _context: Any) -> StringValue:
        return StringValue(value="x" * int(request.value))

    running = await start_server({"unary_unary": grow})
    ask = running.method("unary_unary")
    assert len((await ask(StringValue(value=str(MAX_MESSAGE_BYTES)))).value) == MAX_MESSAGE_BYTES
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(StringValue(value=str(MAX_RECEIVE_BYTES)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_beyond_the_limit_of_a_connection_wait(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_started = 0
    two_started, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_request: StringValue, _context: Any) -> StringValue:
        nonlocal num_started
        num_started += 1
        if num_started == 2:
            two_started.set()
        await go_on.wait()
        return StringValue(value=str(num_started))

    monkeypatch.setattr(servicekit.serving.server, "_MAX_CONCURRENT_STREAMS", 2)
    running = await start_server({"unary_unary": wait})
    # The client learns of the limit with the connection's settings.
    await running.channel.channel_ready()
    calls = [running.method("unary_unary")(StringValue()) for _ in range(3)]
    async with asyncio.timeout(20):
        await two_started.wait()
        # This connection's calls do not delay another connection; by then a third call would run.
        assert (
            await check_health(running.server.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        assert num_started == 2
        go_on.set()
        assert (await calls[2]).value == "3"
        await asyncio.gather(*calls)


async def test_a_connection_that_is_old_ends_with_its_last_call(start_server: Any) -> None:
    go_on = asyncio.Event()

    async def echo(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value=context.peer())
        if request.value == "wait":
            await go_on.wait()
            yield StringValue(value="end")

    running = await start_server({"unary_stream": echo}, max_connection_age_s=0.2)
    ask = running.method("unary_stream")
    async with asyncio.timeout(60):
        ongoing = ask(StringValue(value="wait"))
        first = (await ongoing.read()).value
        # New calls are never refused, and go over another connection sooner or later.
        while (await ask(StringValue()).read()).value == first:
            pass
        go_on.set()
        assert (await ongoing.read()).value == "end"
        assert await ongoing.read() is grpc.aio.EOF
