"""A real gateway on 127.0.0.1:0, and scripted verifiers for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from gateway.text.tokenizer import Tokenizer
from servicekit.channels.discovery import Resolve, resolve_host
from servicekit.config import ServerOptions
from servicekit.logs import Logger, get_logger
from tandem.v1 import gateway_pb2_grpc
from tests.gateway.fleet import Fleet, StartFleet
from tests.gateway.running_gateway import RunningGateway, StartGateway, until
from tests.gateway.running_listener import Run, listener_run
from tests.gateway.scripted_verifier import ScriptedVerifier

MODEL_FOLDER = Path(__file__).parents[2] / "examples" / "demo_model" / "model"

StartVerifier = Callable[..., Awaitable[ScriptedVerifier]]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The bundled model, for its tokenizer."""
    return MODEL_FOLDER


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture
async def start_verifier() -> AsyncIterator[StartVerifier]:
    """Starts stand-ins for verifiers, with limits."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            listen: str = "127.0.0.1:0",
            credentials: grpc.ServerCredentials | None = None,
            **limits: int,
        ) -> ScriptedVerifier:
            scripted = ScriptedVerifier(**limits)
            await scripted.start(listen, credentials)
            stack.push_async_callback(scripted.stop)
            return scripted

        yield start


@pytest.fixture
async def verifier(start_verifier: StartVerifier) -> ScriptedVerifier:
    """A stand-in for the verifier."""
    return await start_verifier()


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Starts gateways, with options of `GatewayConfig`.

    At the end of the test it checks that nothing is left of any request, and no task.
    """
    before = asyncio.all_tasks()
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            verifiers: Sequence[str],
            drafters: Sequence[str] = (),
            is_serving: bool = True,
            resolve: Resolve = resolve_host,
            **options: object,
        ) -> RunningGateway:
            config = GatewayConfig.model_validate(
                {
                    "server": ServerOptions(listen="127.0.0.1:0"),
                    "http_listen": None,
                    "verifiers": list(verifiers),
                    "drafters": list(drafters),
                    "draft_wait": "always",
                    **options,
                }
            )
            registry, log = CollectorRegistry(), structlog.testing.LogCapture()
            logger = structlog.wrap_logger(
                None,
                processors=[structlog.contextvars.merge_contextvars, log],
                wrapper_class=structlog.make_filtering_bound_logger("info"),
            )
            gateway = GatewayServer(config, registry=registry, logger=logger, resolve=resolve)
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            channel = grpc.aio.insecure_channel(gateway.server.address)
            running = RunningGateway(
                gateway=gateway,
                channel=channel,
                stub=gateway_pb2_grpc.GenerationServiceStub(channel),
                registry=registry,
                log=log.entries,
            )

            async def leave() -> None:
                await channel.close()
                await running.until_idle()

            stack.push_async_callback(leave)
            if is_serving:
                await until(lambda: gateway.frontend.is_serving)
            return running

        yield start

    def left() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    # Cancelled calls need some iterations of the loop to end.
    with contextlib.suppress(TimeoutError):
        await until(lambda: not left())
    assert not left(), f"tasks are left: {left()}"


@pytest.fixture
def registry() -> CollectorRegistry:
    """A fresh registry."""
    return CollectorRegistry()


@pytest.fixture
def logger() -> Logger:
    """A logger whose lines nobody reads."""
    return get_logger("test")


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs scenarios against an HTTP listener."""
    return listener_run(request.param, tmp_path)


@pytest.fixture
async def start_fleet(start_gateway: StartGateway, start_verifier: StartVerifier) -> StartFleet:
    """Starts so many scripted verifiers and a gateway for them."""

    async def start(
        num_verifiers: int,
        digests: Sequence[str] = (),
        instance_ids: Sequence[str] = (),
        **options: object,
    ) -> Fleet:
        verifiers = [await start_verifier() for _ in range(num_verifiers)]
        for verifier, instance_id in zip(verifiers, instance_ids, strict=False):
            verifier.instance_id = instance_id
        for verifier, digest in zip(verifiers, digests, strict=False):
            verifier.numerics_digest = digest
        running = await start_gateway(
            verifiers=[verifier.address for verifier in verifiers], **options
        )
        await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
        return Fleet(verifiers, running)

    return start
