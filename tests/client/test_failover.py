"""Both clients and gateways that refuse, fail and vanish: stand-ins on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.client import (
    AsyncTandemClient,
    GenerationRequest,
    Started,
    TandemClient,
    TandemError,
)
from tests.client.in_thread import InThread
from tests.client.stand_in_gateway import StandInGateway, refusal, stand_in_gateway

pytestmark = pytest.mark.stand_in
REQUEST = GenerationRequest(prompt="ren")
GONE = refusal(grpc.StatusCode.UNAVAILABLE, "gone")
STOPPED = refusal(grpc.StatusCode.CANCELLED, "CANCELLED")
FULL = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_ms=1)


def blocking_client(*arguments: Any, **options: Any) -> InThread:
    return InThread(TandemClient(*arguments, **options))


@pytest.fixture(params=[blocking_client, AsyncTandemClient])
def connect(request: pytest.FixtureRequest) -> Any:
    """Makes a client, of each kind in turn."""
    return request.param


@pytest.fixture
async def other() -> AsyncIterator[StandInGateway]:
    async with stand_in_gateway() as servicer:
        yield servicer


async def test_calls_go_to_all_addresses_in_turn(
    gateway: StandInGateway, other: StandInGateway, connect: Any
) -> None:
    async with connect(f"{gateway.address},{other.address}") as client:
        for _ in range(4):
            await client.generate(REQUEST)
    assert (len(gateway.requests), len(other.requests)) == (2, 2)


async def test_an_address_without_a_server_is_skipped(
    gateway: StandInGateway, connect: Any, unused_tcp_port: int
) -> None:
    async with connect([f"127.0.0.1:{unused_tcp_port}", gateway.address]) as client:
        for _ in range(4):
            assert (await client.generate(REQUEST)).text == "néw\nname"
        assert [model.model_id for model in await client.list_models()] == ["demo"]
    assert len(gateway.requests) == 4


@pytest.mark.parametrize("failure", [GONE, STOPPED, FULL])
async def test_a_request_without_output_is_sent_again(
    gateway: StandInGateway, connect: Any, failure: Any
) -> None:
    gateway.interruptions = [(0, failure), (0, failure)]
    async with connect(gateway.address) as client:
        assert (await client.generate(REQUEST)).token_ids == (7, 8, 9, 10)
    assert len(gateway.requests) == 3
    assert gateway.requests[0] == gateway.requests[2]


async def test_no_other_model_goes_on_with_output(gateway: StandInGateway, connect: Any) -> None:
    gateway.script[0].started.model_digest = "digest"
    gateway.interruptions = [(1, GONE), (2, GONE)]
    async with connect(gateway.address) as client:
        await client.generate(REQUEST)
    # Without output any model may begin again.
    expected = [request.expected_model_digest for request in gateway.requests]
    assert expected == ["", "", "digest"]


async def test_a_model_that_began_again_is_told(gateway: StandInGateway, connect: Any) -> None:
    """What the caller knows must be true of the output, which it may go on with itself."""

    async def replace(context: Any) -> None:
        gateway.script[0].started.model_digest = "new"
        gateway.script[0].started.seed = 1
        await GONE(context)

    gateway.script[0].started.model_digest = "old"
    gateway.interruptions = [(1, GONE), (1, replace), (1, GONE)]
    async with connect(gateway.address) as client:
        events = [event async for event in client.stream(REQUEST)]
    assert [(each.model_digest, each.seed) for each in events if isinstance(each, Started)] == [
        ("old", 2**64 - 1),
        ("new", 2**64 - 1),
    ]
    assert all(isinstance(event, Started) for event in events[:2])


@pytest.mark.parametrize("failure", [GONE, STOPPED])
async def test_a_request_with_output_is_resumed_behind_it(
    gateway: StandInGateway, connect: Any, failure: Any
) -> None:
    gateway.interruptions = [(2, failure), (0, FULL)]
    async with connect(gateway.address) as client:
        generation = await client.generate(REQUEST)
    assert generation.token_ids == (7, 8, 9, 10)
    assert generation.text == "néw\nname"
    assert generation.usage.resumes == 1
    assert [list(request.output_token_ids) for request in gateway.requests] == [[], [7], [7]]
    assert gateway.requests[2].sampling.seed == 2**64 - 1


@pytest.mark.parametrize("failure", [GONE, STOPPED])
async def test_models_are_asked_for_again(
    gateway: StandInGateway, connect: Any, failure: Any
) -> None:
    gateway.interruptions = [(0, failure)]
    async with connect(gateway.address) as client:
        assert len(await client.list_models()) == 1


async def test_a_gateway_that_lists_no_models_is_waited_for_as_long_as_the_caller_says(
    gateway: StandInGateway, connect: Any
) -> None:
    gateway.hang = True
    async with connect(gateway.address) as client, asyncio.timeout(60):
        with pytest.raises(TandemError) as caught:
            await client.list_models(timeout_s=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_calls_of_a_closed_client_are_cancelled(
    gateway: StandInGateway, connect: Any
) -> None:
    client = connect(gateway.address)
    await client.close()
    for call in (client.list_models(), client.generate(REQUEST)):
        with pytest.raises(TandemError) as caught:
            await call
        assert caught.value.code is grpc.StatusCode.CANCELLED
    assert not gateway.requests


async def test_what_runs_when_a_client_is_closed_ends_with_an_error_of_its_own(
    gateway: StandInGateway, connect: Any
) -> None:
    """Not with asyncio's CancelledError, which no caller expects who has cancelled nothing."""
    gateway.hang = True
    client = connect(gateway.address)
    async with contextlib.aclosing(client.stream(REQUEST)) as events:
        assert isinstance(await anext(events), Started)

        async def read_on() -> None:
            async for _ in events:
                pass

        reading = asyncio.ensure_future(read_on())
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(TandemError) as caught:
            await reading
    assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_every_call_carries_the_token(gateway: StandInGateway, connect: Any) -> None:
    gateway.interruptions = [(0, GONE)]
    async with connect(gateway.address, token="secret") as client:
        await client.generate(REQUEST)
        await client.list_models()
    assert [each["authorization"] for each in gateway.metadata] == ["Bearer secret"] * 3


async def test_a_stream_that_is_left_is_not_resumed(gateway: StandInGateway, connect: Any) -> None:
    gateway.hang = True
    async with connect(gateway.address) as client:
        async with contextlib.aclosing(client.stream(REQUEST)) as events:
            assert isinstance(await anext(events), Started)
        await gateway.cancelled.wait()
    assert len(gateway.requests) == 1
