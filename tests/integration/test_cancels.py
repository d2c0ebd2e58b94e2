"""Clean cancels (docs/acceptance.md): cancelled requests leave nothing behind."""

import asyncio
import contextlib
import dataclasses
import random

import pytest

from tandem.client import Chunk, GenerationRequest
from tests.integration.pausable_model import PausableLoad
from tests.integration.prompts import PLAIN, rename_prompts
from tests.integration.stack import running_stack, verifier_config, wait_until

NUM_REQUESTS = 200


@pytest.mark.timeout(400)
async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind() -> None:
    choice = random.Random(8)
    # Blocks for a quarter of the requests: the others wait, and are cancelled while they wait.
    config = verifier_config(num_kv_blocks=512, max_num_seqs=48, speculation_depth="learned")
    async with running_stack(verifier=config) as stack:
        prompts = rename_prompts(NUM_REQUESTS, seed=8)
        requests = [GenerationRequest(prompt=p, max_new_tokens=32) for p in prompts]
        # Tasks are counted after a first request, which starts those that live on.
        await stack.generate(requests[0])
        num_tasks = len(asyncio.all_tasks())

        async def run(request: GenerationRequest, num_chunks: int | None) -> bool:
            """Leaves after `num_chunks` chunks (None: never). Returns whether the request ended."""
            num_seen = 0
            async with contextlib.aclosing(stack.client.stream(request)) as events:
                async for event in events:
                    num_seen += isinstance(event, Chunk)
                    if num_seen == num_chunks:
                        return False
            return True

        async def cancelled(request: GenerationRequest, delay_s: float) -> bool:
            task = asyncio.ensure_future(run(request, None))
            _, running = await asyncio.wait((task,), timeout=delay_s)
            for each in running:
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await task
            return False

        runs = []
        for index, request in enumerate(requests):
            if index % 5 == 0:
                request = dataclasses.replace(request, speculation=PLAIN)
            if index % 2:
                runs.append(run(request, choice.choice((None, 1, 2, 5))))
            else:
                runs.append(cancelled(request, choice.uniform(0.0, 3.0)))
        ended = await asyncio.gather(*runs)
        assert 0 < sum(ended) < NUM_REQUESTS
        await wait_until(lambda: len(asyncio.all_tasks()) <= num_tasks, or_show=asyncio.all_tasks)
        await stack.check_idle()
        # The last releases reach the drafter a moment later.

        def num_known() -> float:
            return stack.metric("drafter", "tandem_drafter_sequences")

        await wait_until(lambda: num_known() == 0, or_show=num_known)
        # It still serves.
        assert (await stack.generate(requests[1])).usage.output_tokens > 0


async def test_a_cancel_frees_the_kv_within_one_step() -> None:
    load = PausableLoad()
    [prompt] = rename_prompts(1, seed=9)
    request = GenerationRequest(prompt=prompt, max_new_tokens=1500, ignore_eos=True)
    async with running_stack(load=load, gateway={"drafters": []}) as stack:
        async with contextlib.aclosing(stack.client.stream(request)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    break
            assert stack.engine.load.num_kv_blocks_used > 0
            # The engine pauses in its next step, unless the Close comes first.
            load.model.may_run.clear()
        engine = stack.engine
        await wait_until(lambda: engine.num_pending_commands > 0 or engine.load.num_running == 0)
        num_steps = stack.engine.load.num_steps
        load.model.may_run.set()
        await stack.check_idle()
        assert stack.engine.load.num_steps - num_steps <= 1
