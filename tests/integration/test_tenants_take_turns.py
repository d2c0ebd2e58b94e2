"""One tenant's long requests hold all places; another's short ones do not wait for their end."""

import asyncio
import contextlib
from pathlib import Path

from tandem.client import AsyncTandemClient, Generation, GenerationRequest, SamplingParams
from tandem.generation import EventCollector
from tests.gateway.clients import write_clients
from tests.integration.stack import running_stack, verifier_config, wait_until
from verifier.engine.engine import Engine
from verifier.engine.observation import EngineObserver, StepRecord

GREEDY, MODEST = "6:greedy/", "6:modest/"
# Steps between two sequences that make way.
STEPS_PER_WAY = 8


class QueueWatch(EngineObserver):
    """Counts the steps that a tenant's sequences waited for, and the tokens decided meanwhile."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.num_steps_waited: dict[str, int] = {}
        self.weights: set[tuple[str, int]] = set()

    def stepped(self, record: StepRecord) -> None:
        assert self.engine is not None
        for sequence in self.engine._scheduler.waiting:
            if sequence.cache_salt == MODEST:
                number = self.num_steps_waited.get(sequence.sequence_id, 0)
                self.num_steps_waited[sequence.sequence_id] = number + 1
        for item in record.scheduled:
            self.weights.add((item.sequence.cache_salt, item.sequence.tenant_weight))


async def generate(client: AsyncTandemClient, prompt: str, num_tokens: int) -> Generation:
    request = GenerationRequest(
        prompt=prompt,
        max_new_tokens=num_tokens,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    collector = EventCollector()
    async with contextlib.aclosing(client.stream(request)) as events:
        async for event in events:
            collector.add(event)
    return collector.generation()


async def test_a_newcomer_waits_for_a_few_steps_and_no_text_shows_it(tmp_path: Path) -> None:
    watch = QueueWatch()
    clients = write_clients(
        tmp_path / "clients.yaml",
        greedy={"tokens": ["g"], "max_concurrent_requests": 64},
        modest={"tokens": ["m"], "weight": 3},
    )
    async with contextlib.AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            running_stack(
                verifier=verifier_config(max_num_seqs=2),
                gateway={"clients": clients},
                observer=watch,
            )
        )
        watch.engine = services.engine
        address = services.gateway.server.address
        greedy, modest = [
            await stack.enter_async_context(AsyncTandemClient(address, token=token, retry=None))
            for token in ("g", "m")
        ]
        prompts = [f"def f{i}(x):\n    return" for i in range(8)]
        long = [asyncio.create_task(generate(greedy, prompt, 900)) for prompt in prompts]
        await wait_until(lambda: services.engine.load.num_waiting == 6)
        short = [await generate(modest, "import os", 8) for _ in range(5)]
        assert services.engine.load.num_waiting >= 5, "the long ones were done anyway"
        await asyncio.gather(*long)
        again = await asyncio.gather(*(generate(greedy, prompt, 900) for prompt in prompts[:2]))
    assert {len(each.token_ids) for each in short} == {8}
    assert len({tuple(each.token_ids) for each in short}) == 1
    assert max(watch.num_steps_waited.values(), default=0) <= STEPS_PER_WAY
    assert watch.weights == {(GREEDY, 1), (MODEST, 3)}
    # Some of them made way, and were computed again.
    assert [each.token_ids for each in again] == [task.result().token_ids for task in long[:2]]
