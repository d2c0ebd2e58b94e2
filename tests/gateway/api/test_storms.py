"""Storms of requests that are opened and closed, over gRPC and HTTP alike, hold up nobody."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.api.turns import MAX_TURNS, Turns
from gateway.coordinator import Coordinator
from tests.gateway.conftest import MODEL_FOLDER
from tests.gateway.openai.clients import connection, get, request_bytes
from tests.gateway.running_gateway import RunningGateway, StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

NUM_CLIENTS = 200
BODY = {"model": "scripted", "prompt": "def add(a, b):", "stream": True}

Storm = Callable[[RunningGateway], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def storm_over_http(running: RunningGateway) -> AsyncIterator[None]:
    """Clients that have sent requests; they have left by the end of the context."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            _, writer = await stack.enter_async_context(connection(running))
            writer.write(request_bytes("/v1/completions", BODY))
        yield
    listener = running.gateway._http
    assert listener is not None
    await until(lambda: not listener._server.server_state.connections)


@contextlib.asynccontextmanager
async def storm_over_grpc(running: RunningGateway) -> AsyncIterator[None]:
    """Calls that are cancelled by the end of the context."""
    calls = [running.call(text="def add(a, b):") for _ in range(NUM_CLIENTS)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    yield
    for call in calls:
        call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    labels = {"method": "Generate", "code": "CANCELLED"}
    await until(lambda: running.sample("tandem_rpc_requests_total", **labels) == NUM_CLIENTS)


STORMS = {"http": storm_over_http, "grpc": storm_over_grpc}


@pytest.fixture
def let_begin(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, no turns are given beyond those of one iteration."""
    let, give = asyncio.Event(), Turns._give

    def give_if_let(self: Turns) -> None:
        if let.is_set():
            give(self)
        else:
            asyncio.get_running_loop().call_later(0.001, give_if_let, self)

    monkeypatch.setattr(Turns, "_give", give_if_let)
    return let


@pytest.mark.parametrize("kind", STORMS)
async def test_health_is_answered_before_those_that_came_earlier_begin(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    let_begin: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], http_listen="127.0.0.1:0", tokenizer=MODEL_FOLDER
    )
    num_opened = 0
    open_generations = Coordinator.open

    def counted_open(*args: object) -> None:
        nonlocal num_opened
        num_opened += 1
        open_generations(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Coordinator, "open", counted_open)
    turns = running.gateway.frontend.turns
    for _ in range(MAX_TURNS):
        await turns.take(lambda: False)
    async with STORMS[kind](running):
        await until(lambda: len(turns._waiting) == NUM_CLIENTS)
        let_begin.set()
        assert (await get(running, "/health")).status == 200
        # Some began while its connection was accepted, read and answered.
        assert num_opened < NUM_CLIENTS / 4
        await until(lambda: num_opened == NUM_CLIENTS)
    await running.until_idle()
