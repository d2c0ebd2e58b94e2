"""A real drafter on 127.0.0.1:0 with a clock that the test sets."""

import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
import structlog
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.config import ServerOptions
from tandem.v1 import drafter_pb2_grpc
from tests.drafter.running_drafter import FakeClock, RunningDrafter, StartDrafter


@pytest.fixture
async def start_drafter() -> AsyncIterator[StartDrafter]:
    """A function that starts a drafter with options of `DrafterConfig`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, is_open: bool = True, **options: object) -> RunningDrafter:
            config = DrafterConfig.model_validate(
                {"server": ServerOptions(listen="127.0.0.1:0"), **options}
            )
            registry, clock, log = CollectorRegistry(), FakeClock(), structlog.testing.LogCapture()
            logger = structlog.wrap_logger(
                None,
                processors=[log],
                wrapper_class=structlog.make_filtering_bound_logger("info"),
            )
            drafter = DrafterServer(
                config,
                registry=registry,
                logger=logger,
                clock=clock,
            )
            stack.push_async_callback(drafter.server.stop, 0)
            if is_open:
                await drafter.start()
            else:
                await drafter.server.start()
            channel = grpc.aio.insecure_channel(drafter.server.address)
            running = RunningDrafter(
                drafter=drafter,
                channel=channel,
                stub=drafter_pb2_grpc.DrafterServiceStub(channel),
                registry=registry,
                clock=clock,
                log=log.entries,
            )

            async def close_client() -> None:
                for stream in running.streams:
                    stream.cancel()
                await channel.close()

            stack.push_async_callback(close_client)
            return running

        yield start
