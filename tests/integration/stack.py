"""The three services in this process, on real sockets, with their state open to tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from servicekit.config import ServerOptions
from tandem.client import AsyncTandemClient, Generation, GenerationRequest
from tandem.generation import EventCollector
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.drafts.draft_buffer import HintOutcome
from verifier.engine.engine import Engine
from verifier.engine.observation import EngineObserver
from verifier.server import VerifierServer

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "demo_model" / "model"

LOOPBACK = ServerOptions(listen="127.0.0.1:0")


@dataclass(slots=True, kw_only=True)
class Stack:
    """The three services and a client."""

    drafter: DrafterServer
    verifier: VerifierServer
    gateway: GatewayServer
    engine: Engine
    client: AsyncTandemClient
    registries: dict[str, CollectorRegistry] = field(default_factory=dict)

    def metric(self, service: str, name: str, **labels: str) -> float:
        """A sample of a service's registry; 0 if it is not there yet."""
        return self.registries[service].get_sample_value(name, labels) or 0.0

    def hints(self, outcome: HintOutcome) -> float:
        return self.metric("verifier", "tandem_draft_hints_total", outcome=outcome.value)

    async def generate(self, request: GenerationRequest) -> Generation:
        collector = EventCollector()
        async with contextlib.aclosing(self.client.stream(request)) as events:
            async for event in events:
                collector.add(event)
        return collector.generation()

    async def generate_all(
        self, requests: Sequence[GenerationRequest], *, streams: int
    ) -> list[Generation]:
        """All requests, `streams` at a time; results in request order."""
        room = asyncio.Semaphore(streams)

        async def one(request: GenerationRequest) -> Generation:
            async with room:
                return await self.generate(request)

        return await asyncio.gather(*(one(request) for request in requests))

    async def check_idle(self) -> None:
        """Waits until the verifier has no sequence; asserts that no service holds state of one.

        The drafter's response to the last message may still be on its way.
        """
        await asyncio.wrap_future(self.engine.when_idle())
        await asyncio.wrap_future(self.engine.call(self.engine.check_integrity))
        assert self.engine.load.num_kv_blocks_used == 0
        await wait_until(self._is_gateway_idle, timeout_s=20.0)

    def _is_gateway_idle(self) -> bool:
        try:
            self.gateway.frontend.check_idle()
        except AssertionError:
            return False
        return True


# Gateway options with which every step waits for its drafts and verifies them all: for tests that
# count drafts. With others, how many are verified depends on which come in time.
EVERY_DRAFT: dict[str, object] = {"draft_wait": "always"}


def verifier_config(**options: object) -> VerifierConfig:
    """A configuration of one thread, as more stall each other, and blocks for 32,768 tokens.

    Nothing that a busy machine slows down is held against drafts or drafters.
    """
    defaults = {
        "server": LOOPBACK,
        "model": MODEL,
        "threads": 1,
        "num_kv_blocks": 2048,
        "speculation_depth": "limits",
        "draft_deadline_s": 60.0,
    }
    return VerifierConfig.model_validate({**defaults, **options})


@contextlib.asynccontextmanager
async def running_stack(
    *,
    verifier: VerifierConfig | None = None,
    drafter: dict[str, object] | None = None,
    gateway: dict[str, object] | None = None,
    load: Callable[[VerifierConfig], LoadedModel] = load_model,
    observer: EngineObserver | None = None,
) -> AsyncIterator[Stack]:
    """Starts the services and a client; stops them on exit.

    The verifier admits the drafters that the gateway chooses from.

    Args:
        load: builds the verifier's model.
        observer: receives every engine step.
        drafter, gateway: options of their configurations.
    """
    logger = structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()])
    registries = {name: CollectorRegistry() for name in ("drafter", "verifier", "gateway")}
    async with contextlib.AsyncExitStack() as stack:
        its_drafter = DrafterServer(
            DrafterConfig.model_validate({"server": LOOPBACK, **(drafter or {})}),
            registry=registries["drafter"],
            logger=logger,
        )
        stack.push_async_callback(its_drafter.server.stop, 0)
        await its_drafter.start()
        drafters = {"drafters": [its_drafter.server.address], **(gateway or {})}["drafters"]
        its_verifier = VerifierServer(
            (verifier or verifier_config()).model_copy(update={"drafters": drafters}),
            registry=registries["verifier"],
            logger=logger,
        )
        stack.push_async_callback(its_verifier.server.stop, 0)
        engine = await its_verifier.start(load, observer)
        stack.push_async_callback(_stop_engine, engine)
        config = {
            "server": LOOPBACK,
            "http_listen": "127.0.0.1:0",
            "tokenizer": MODEL,
            "drafters": drafters,
            "verifiers": [its_verifier.server.address],
            **(gateway or {}),
        }
        its_gateway = GatewayServer(
            GatewayConfig.model_validate(config), registry=registries["gateway"], logger=logger
        )
        stack.push_async_callback(its_gateway.stop)
        await its_gateway.start()
        await its_gateway.wait_until_serving()
        # No failure may be hidden from a test.
        client = await stack.enter_async_context(
            AsyncTandemClient(its_gateway.server.address, retry=None)
        )
        yield Stack(
            drafter=its_drafter,
            verifier=its_verifier,
            gateway=its_gateway,
            engine=engine,
            client=client,
            registries=registries,
        )


async def wait_until(
    condition: Callable[[], bool],
    *,
    or_show: Callable[[], object] = lambda: "the condition did not become true",
    timeout_s: float = 60.0,
) -> None:
    """Polls a condition that has no event to wait for. Fails with `or_show()` after `timeout_s`."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, or_show()
        await asyncio.sleep(0.01)


async def _stop_engine(engine: Engine) -> None:
    engine.stop()
    await asyncio.wrap_future(engine.stopped)
