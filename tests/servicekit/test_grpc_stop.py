"""How a gRPC server stops, asked once or by several at once."""

import asyncio
import faulthandler
import random
from typing import Any

import grpc
import pytest

from servicekit.serving.grpc_stop import GrpcStop

METHOD = "/test.v1.Waiting/Wait"
NUM_STOPS = 200


class Waiting:
    """A server with one method that answers when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.server = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(self._wait)
        self.server.add_registered_method_handlers("test.v1.Waiting", {"Wait": handler})
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _wait(self, _request: bytes, _context: object) -> bytes:
        self.has_begun.set()
        await self.may_end.wait()
        return b"done"

    async def begin_call(self, channel: grpc.aio.Channel) -> Any:
        """Returns a call that the server has begun."""
        method: Any = channel.unary_unary(METHOD)
        call = method(b"", wait_for_ready=True)
        await self.has_begun.wait()
        return call


@pytest.fixture
async def waiting() -> Waiting:
    waiting = Waiting()
    await waiting.server.start()
    return waiting


async def test_the_shortest_grace_counts(waiting: Waiting) -> None:
    stop = GrpcStop(waiting.server)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{waiting.port}") as channel:
        call = await waiting.begin_call(channel)
        stop.begin()
        longer = asyncio.create_task(stop.stop(60))
        async with asyncio.timeout(30):
            await stop.stop(0)
            await longer
        assert await call.code() is not grpc.StatusCode.OK


async def test_stops_while_the_last_call_ends_do_not_crash_the_process() -> None:
    """As those of grpc.aio do, within a few tries."""
    faulthandler.enable()
    for _ in range(NUM_STOPS):
        waiting = Waiting()
        await waiting.server.start()
        stop = GrpcStop(waiting.server)
        options = [("grpc.use_local_subchannel_pool", 1)]
        target = f"127.0.0.1:{waiting.port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            call = await waiting.begin_call(channel)
            stop.begin()
            waiting.may_end.set()
            await asyncio.sleep(random.uniform(0, 0.003))
            await asyncio.gather(*(stop.stop(0) for _ in range(3)))
            await call.code()
