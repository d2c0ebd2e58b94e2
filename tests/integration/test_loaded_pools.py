"""Texts that clients load into pools: requests draft from them, and what fails is told."""

import asyncio
import hashlib
import json
from pathlib import Path

import grpc
import pytest
import structlog

from examples.demo_model.dataset import read_heldout
from gateway.peers.pool_feeder import PoolFeeder
from servicekit.config import ChannelOptions
from tandem.client import AsyncTandemClient, GenerationRequest, SpeculationParams, TandemError
from tandem.free_ports import free_port
from tests.integration.stack import EVERY_DRAFT, Stack, running_stack

TASK = read_heldout()[53]
UNAVAILABLE, INVALID = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT


async def num_pool_drafts(client: AsyncTandemClient, speculation: SpeculationParams) -> int:
    """Of the task, which the client's model answers in any case as it does without drafts."""
    prompt = TASK["prompt"]
    plain = await client.generate(
        GenerationRequest(prompt=prompt, speculation=SpeculationParams(enabled=False))
    )
    drafted = await client.generate(GenerationRequest(prompt=prompt, speculation=speculation))
    assert drafted.token_ids == plain.token_ids
    return drafted.usage.num_pool_drafts


async def test_a_tenant_alone_drafts_from_what_it_has_loaded(tmp_path: Path) -> None:
    clients = tmp_path / "clients.yaml"
    tenants = {
        each: {"clients": [{"token_sha256": hashlib.sha256(each.encode()).hexdigest()}]}
        for each in ("a", "b")
    }
    clients.write_text(json.dumps({"tenants": tenants}))
    # The requests themselves feed nothing.
    pool = SpeculationParams(pool="docs", pool_keep="nothing")
    async with running_stack(gateway={"clients": clients, **EVERY_DRAFT}) as stack:
        address = stack.gateway.server.address
        async with (
            AsyncTandemClient(address, token="a") as own,
            AsyncTandemClient(address, token="b") as other,
        ):
            answer = (await own.generate(GenerationRequest(prompt=TASK["prompt"]))).text
            text = TASK["prompt"] + answer
            num_tokens = await own.load_pool("docs", text)
            assert await own.load_pool("docs", text) == num_tokens
            await stack.drafter.pool_keeper.settle()
            [loaded] = stack.drafter.pools.texts_of("1:a/docs")
            assert len(loaded.token_ids) == num_tokens, "the same text is loaded once"
            assert await num_pool_drafts(own, pool) > 0
            assert await num_pool_drafts(other, pool) == 0
            with pytest.raises(TandemError) as caught:
                async with AsyncTandemClient(address) as unknown:
                    await unknown.load_pool("docs", text)
            assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
        await stack.check_idle()


@pytest.fixture(scope="module")
def long_text() -> str:
    """More tokens than one delta holds, and than a small drafter's pools have room for."""
    return " ".join(f"{number * 7919:x}" for number in range(20_000))


async def refused(stack: Stack, pool: str, text: str, model_id: str = "") -> tuple[object, str]:
    with pytest.raises(TandemError) as caught:
        await stack.client.load_pool(pool, text, model_id=model_id)
    await stack.check_idle()
    return caught.value.code, caught.value.field


async def test_what_cannot_be_loaded_is_refused_by_name(long_text: str) -> None:
    small: dict[str, object] = {"max_pool_bytes": 1 << 17, "max_pools_bytes": 1 << 18}
    async with running_stack(drafter=small) as stack:
        assert await refused(stack, "", "text") == (INVALID, "pool")
        assert await refused(stack, "docs", "") == (INVALID, "text")
        assert await refused(stack, "docs", "text", "absent") == (INVALID, "model_id")
        assert await refused(stack, "p" * 129, "text") == (INVALID, "pool")
        assert await refused(stack, "docs", long_text) == (UNAVAILABLE, "pool")
        assert stack.drafter.store.num_sequences == 0
        assert stack.drafter.pools.num_texts == 0


async def test_a_text_of_many_deltas_is_loaded_whole(long_text: str) -> None:
    async with running_stack() as stack:
        num_tokens = await stack.client.load_pool("docs", long_text)
        assert num_tokens > 8192
        [loaded] = stack.drafter.pools.texts_of("0:/docs")
        assert len(loaded.token_ids) == num_tokens
        assert stack.drafter.store.num_sequences == 0


@pytest.mark.parametrize("drafters", [[], [f"127.0.0.1:{free_port()}"]])
async def test_without_a_drafter_nothing_is_loaded(drafters: list[str]) -> None:
    async with running_stack(gateway={"drafters": drafters}) as stack:
        assert await refused(stack, "docs", "some text") == (UNAVAILABLE, "")


async def test_a_load_that_is_given_up_leaves_nothing() -> None:
    async with running_stack() as stack:
        feeder = PoolFeeder(ChannelOptions(), logger=structlog.get_logger())
        token_ids = list(range(8192)) * 16
        address = stack.drafter.server.address
        load = asyncio.create_task(feeder.load([address], "0:/docs", token_ids))
        while not stack.drafter.store.num_sequences:  # noqa: ASYNC110 - a store has no event
            await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert stack.drafter.store.num_sequences == 0
        assert stack.drafter.pools.num_texts == 0
