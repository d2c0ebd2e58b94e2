"""What a pool gets of a request through all services, by how the request ends."""

import pytest

from tandem.client import GenerationRequest, SpeculationParams
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
