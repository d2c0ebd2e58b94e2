"""What a pool gets of a request through all services, by how the request ends."""

import contextlib

import pytest

from tandem.client import Chunk, GenerationRequest, SpeculationParams
from tests.integration.pausable_model import PausableLoad
from tests.integration.prompts import rename_prompts
from tests.integration.stack import Stack, running_stack, wait_until

POOL_ID = "0:/shared"
NUM_TOKENS = 40


def fed(stack: Stack) -> list[list[int]]:
    """The texts in the pool."""
    return [text.token_ids.tolist() for text in stack.drafter.pools.texts_of(POOL_ID)]


def request(
    *,
    max_new_tokens: int = NUM_TOKENS,
    stop_sequences: tuple[str, ...] = (),
    speculation: SpeculationParams | None = None,
) -> GenerationRequest:
    [prompt] = rename_prompts(1, seed=3)
    return GenerationRequest(
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        ignore_eos=True,
        stop_sequences=stop_sequences,
        speculation=speculation or SpeculationParams(pool="shared"),
    )


async def settle(stack: Stack) -> None:
    """Waits until the drafter has forgotten every sequence, and kept what it keeps."""
    await wait_until(lambda: stack.drafter.store.num_sequences == 0)
    await stack.check_idle()
    await stack.drafter.pool_keeper.settle()


@pytest.mark.parametrize("stop_sequences", [(), ("never in this text",)])
async def test_a_pool_gets_the_whole_output(stop_sequences: tuple[str, ...]) -> None:
    async with running_stack() as stack:
        generation = await stack.generate(request(stop_sequences=stop_sequences))
        await wait_until(lambda: stack.drafter.pools.num_texts == 1)
        await settle(stack)
        assert fed(stack) == [list(generation.token_ids)]
        assert len(generation.token_ids) == NUM_TOKENS


async def test_a_pool_gets_nothing_behind_a_stop_string() -> None:
    async with running_stack() as stack:
        whole = await stack.generate(request(speculation=SpeculationParams()))
        middle = len(whole.text) // 2
        stop = whole.text[middle : middle + 5]
        cut = await stack.generate(request(stop_sequences=(stop,)))
        await wait_until(lambda: stack.drafter.pools.num_texts == 1)
        await settle(stack)
        assert 0 < len(cut.token_ids) < NUM_TOKENS
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert fed(stack) == [list(cut.token_ids)]


@pytest.mark.parametrize("is_wanted", [False, True])
@pytest.mark.parametrize("stop_sequences", [(), ("never in this text",)])
async def test_a_cancelled_request_feeds_its_pool_only_on_request(
    is_wanted: bool, stop_sequences: tuple[str, ...]
) -> None:
    load = PausableLoad()
    async with running_stack(load=load) as stack:
        whole = await stack.generate(request(speculation=SpeculationParams()))
        # Slow, so that the text is far from its end when it is cancelled.
        load.model.pause_s = 0.01
        speculation = SpeculationParams(
            pool="shared", pool_keep_cancelled=is_wanted, num_speculative_tokens=1
        )
        cancelled = request(
            speculation=speculation, stop_sequences=stop_sequences, max_new_tokens=400
        )
        received: list[int] = []
        async with contextlib.aclosing(stack.client.stream(cancelled)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    received += event.token_ids
                if len(received) >= 5:
                    load.model.may_run.clear()
                    break
        engine = stack.engine
        await wait_until(lambda: engine.num_pending_commands > 0 or engine.load.num_running == 0)
        load.model.pause_s = 0.0
        load.model.may_run.set()
        await settle(stack)
        texts = fed(stack)
        assert len(texts) == is_wanted
        for text in texts:
            assert len(text) >= len(received)
            assert text[:NUM_TOKENS] == list(whole.token_ids)[: len(text)]
