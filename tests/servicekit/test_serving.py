"""Serving until a signal and the end of a process. Signals are sent to this very process."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions
from servicekit.serving.process import run, serve_until_signalled
from servicekit.serving.server import Server
from tests.servicekit.factories import call, check_health, make_server


def kill_self(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[tuple[Server, asyncio.Task[None]]]]]:
    """Starts a server and `serve_until_signalled`; returns when it is ready."""
    tasks = []

    async def start(
        *,
        behaviour: Any = None,
        is_streaming: bool = False,
        drain_timeout_s: float = 30.0,
        **arguments: Any,
    ) -> tuple[Server, asyncio.Task[None]]:
        server = make_server(
            drain_timeout_s=drain_timeout_s,
            health_listen="127.0.0.1:0",
        )
        if behaviour is not None:
            handler: Any = (
                grpc.unary_stream_rpc_method_handler(behaviour)
                if is_streaming
                else grpc.unary_unary_rpc_method_handler(behaviour)
            )
            server.grpc.add_registered_method_handlers("test.v1.EchoService", {"Echo": handler})
        await server.start()
        ready = asyncio.Event()

        def ready_line() -> str:
            ready.set()
            return "ready"

        arguments.setdefault("ready_line", ready_line)
        task = asyncio.create_task(serve_until_signalled(server, **arguments))
        tasks.append(task)
        async with asyncio.timeout(20):
            await ready.wait()
        return server, task

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def assert_stopped(server: Server) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check_health(server.address)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_makes_it_say_not_serving_drain_and_stop(serve: Any, number: int) -> None:
    draining, drained = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await drained.wait()

    handler = signal.getsignal(number)
    server, task = await serve(drain=drain)
    assert signal.getsignal(number) is not handler
    assert await check_health(server.address) == health_pb2.HealthCheckResponse.SERVING
    kill_self(number)
    async with asyncio.timeout(20):
        await draining.wait()
        # The probes' port still answers, and says so also when the service, which need not know,
        # finds itself well again.
        server.set_serving()
        assert (
            await check_health(server.health_address) == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        assert not task.done()
        drained.set()
        await task
    await assert_stopped(server)
    assert signal.getsignal(number) is handler


async def test_without_a_drain_calls_in_flight_get_the_timeout(serve: Any) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def answer(_request: bytes, _context: Any) -> bytes:
        started.set()
        await go_on.wait()
        return b"answer"

    server, task = await serve(behaviour=answer)
    async with open_channel(server.address, ChannelOptions()) as channel, asyncio.timeout(20):
        ongoing = call(channel)
        await started.wait()
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        kill_self()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not task.done()
        go_on.set()
        assert await ongoing == b"answer"
        await task


async def test_while_streams_finish_new_calls_of_open_channels_go_elsewhere(serve: Any) -> None:
    go_on, draining = asyncio.Event(), asyncio.Event()

    async def stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"first of one"
        await go_on.wait()
        yield b"last of one"

    async def other(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"all of two"

    async def drain() -> None:
        draining.set()
        await go_on.wait()

    second = make_server()
    handler: Any = grpc.unary_stream_rpc_method_handler(other)
    second.grpc.add_registered_method_handlers("test.v1.EchoService", {"Echo": handler})
    await second.start()
    server, task = await serve(behaviour=stream, is_streaming=True, drain=drain)
    async with (
        open_channel(f"ipv4:{server.address},{second.address}", ChannelOptions()) as channel,
        asyncio.timeout(20),
    ):
        ask: Any = channel.unary_stream("/test.v1.EchoService/Echo")
        running = ask(b"")
        assert await running.read() == b"first of one"
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        kill_self()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await draining.wait()
        # A call on its way when the server began to refuse may be refused: it has not begun.
        answer = None
        while answer is None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await ask(b"").read()
        assert answer == b"all of two"
        assert not task.done()
        go_on.set()
        assert await running.read() == b"last of one"
        await task
    await second.stop(0)


async def test_a_drain_that_hangs_is_cancelled_at_the_timeout(serve: Any) -> None:
    cancelled = asyncio.Event()

    async def drain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server, task = await serve(drain=drain, drain_timeout_s=0.1)
    start_s = time.monotonic()
    kill_self()
    async with asyncio.timeout(20):
        await task
    assert cancelled.is_set()
    assert 0.1 <= time.monotonic() - start_s < 20
    await assert_stopped(server)


async def test_streams_that_only_their_client_would_end_do_not_hold_up_the_stop(serve: Any) -> None:
    started = asyncio.Event()

    async def hang(_request: bytes, _context: Any) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    async def drain() -> None:
        pass

    server, task = await serve(behaviour=hang, drain=drain, drain_timeout_s=60)
    async with open_channel(server.address, ChannelOptions()) as channel:
        ongoing = call(channel)
        await started.wait()
        kill_self()
        async with asyncio.timeout(20):
            await task
            with pytest.raises(grpc.aio.AioRpcError):
                await ongoing


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_failure_ends_it_with_its_error_and_without_drain(
    serve: Any, is_draining: bool
) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    draining = asyncio.Event()

    async def drain() -> None:
        draining.set()
        await asyncio.Event().wait()

    server, task = await serve(drain=drain, failed=failed)
    async with asyncio.timeout(20):
        if is_draining:
            kill_self()
            await draining.wait()
        failed.set_exception(RuntimeError("the engine died"))
        with pytest.raises(RuntimeError, match="the engine died"):
            await task
    assert draining.is_set() == is_draining
    await assert_stopped(server)


async def test_a_cancelled_serving_stops_the_server(serve: Any) -> None:
    server, task = await serve()
    task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task
    await assert_stopped(server)


# Exit codes.


def test_any_other_error_is_logged_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise RuntimeError("broken")

    assert run(main) == 1
    captured = capsys.readouterr()
    assert "process_failed" in captured.out + captured.err
    assert "RuntimeError" in captured.out + captured.err
