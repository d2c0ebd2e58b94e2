"""Channels: both ends notice a frozen peer, and a client finds a server that returns."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

import servicekit
from servicekit.channels import limits
from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions

# The factors by which intervals (gRPC pings at most once per second) and timeouts (which must allow
# for a busy machine) are shorter than the real ones.
HASTE = 50
HASTE_OF_TIMEOUTS = 5

PEER = f"""
import asyncio
import sys

import servicekit
import grpc
from prometheus_client import CollectorRegistry

from servicekit.channels import channel, limits
from servicekit.serving import server
from servicekit.config import ChannelOptions, ServerOptions
from servicekit.logs import get_logger


def hasten(arguments):
    return tuple(
        (key, v // ({HASTE_OF_TIMEOUTS} if "timeout" in key else {HASTE} if "_ms" in key else 1))
        for key, v in arguments
    )


async def hang(_request, _context):
    await asyncio.Event().wait()


async def serve():
    own = server.Server(ServerOptions(), service="peer", service_names=[], error_table={{}},
                        registry=CollectorRegistry(), logger=get_logger("peer"))
    handler = grpc.unary_unary_rpc_method_handler(hang)
    own.grpc.add_registered_method_handlers("test.v1.EchoService", {{"Echo": handler}})
    async with own:
        print(own.address, flush=True)
        await asyncio.Event().wait()


async def call(address):
    async with channel.open_channel(address, ChannelOptions()) as own:
        await own.unary_unary("/test.v1.EchoService/Echo")(b"")


channel.KEEPALIVE = server.KEEPALIVE = hasten(limits.KEEPALIVE)
server.PING_TOLERANCE = hasten(limits.PING_TOLERANCE)
asyncio.run(serve() if len(sys.argv) == 1 else call(sys.argv[1]))
"""


def call_echo(channel: grpc.aio.Channel) -> Any:
    method: Any = channel.unary_unary("/test.v1.EchoService/Echo")
    return method(b"")


def hasten(arguments: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (key, v // (HASTE_OF_TIMEOUTS if "timeout" in key else HASTE if "_ms" in key else 1))
        for key, v in arguments
    )


@pytest.fixture
def start_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts a server, or a client of the address given, in a process that can be frozen."""
    monkeypatch.setattr("servicekit.channels.channel.KEEPALIVE", hasten(limits.KEEPALIVE))
    monkeypatch.setattr("servicekit.serving.server.KEEPALIVE", hasten(limits.KEEPALIVE))
    monkeypatch.setattr("servicekit.serving.server.PING_TOLERANCE", hasten(limits.PING_TOLERANCE))
    with contextlib.ExitStack() as stack:

        def start(*argv: str) -> "subprocess.Popen[str]":
            environ = {**os.environ, "PYTHONPATH": str(Path(servicekit.__file__).parents[1])}
            environ.pop("GRPC_VERBOSITY", None)
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PEER, *argv],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


async def test_a_client_keeps_an_idle_call_open_and_notices_a_frozen_server(
    start_peer: Any,
) -> None:
    peer = start_peer()
    assert peer.stdout is not None
    async with open_channel(peer.stdout.readline().strip(), ChannelOptions()) as channel:
        call = call_echo(channel)
        # Long enough for the server to refuse a fourth ping, or for the client to stop pinging
        # because it sends nothing else.
        done, _ = await asyncio.wait([asyncio.ensure_future(call.code())], timeout=6)
        assert not done
        peer.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping timeout" in await call.details()


async def test_a_server_notices_a_frozen_client(start_peer: Any, start_server: Any) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(_request: StringValue, _context: Any) -> StringValue:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return StringValue()

    running = await start_server({"unary_unary": hang})
    peer = start_peer(running.server.address)
    async with asyncio.timeout(20):
        await started.wait()
        peer.send_signal(signal.SIGSTOP)
        await cancelled.wait()
    await running.counted("CANCELLED")


async def echo(request: StringValue, _context: Any) -> StringValue:
    return request


async def test_the_user_agent_comes_first(start_server: Any) -> None:
    agents = []

    async def record(request: StringValue, context: Any) -> StringValue:
        agents.append(dict(context.invocation_metadata())["user-agent"])
        return request

    running = await start_server({"unary_unary": record})
    for user_agent in (None, "thing/1.0"):
        async with open_channel(
            running.server.address, ChannelOptions(), user_agent=user_agent
        ) as channel:
            await call_echo(channel)
    assert agents[0].startswith("grpc-python-asyncio")
    assert agents[1].startswith("thing/1.0 grpc-python-asyncio")


async def test_the_environments_proxy_is_not_for_services(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    running = await start_server({"unary_unary": echo})
    assert (await running.method("unary_unary")(StringValue(value="1"))).value == "1"
