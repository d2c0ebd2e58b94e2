"""Load on a gateway: tasks through its client, a number of streams at a time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from benchmarks.turns import Variant
from benchmarks.workloads import Task
from tandem.client import (
    AsyncTandemClient,
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    Usage,
)
from tandem.generation import EventCollector


async def run_tasks(
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    streams: int,
    speculation: SpeculationParams,
) -> tuple[int, Sequence[Usage]]:
    """Runs all tasks, `streams` at a time; returns output tokens and usages."""
    waiting = list(enumerate(tasks))
    usages: list[Usage] = []

    async def one_stream() -> None:
        while waiting:
            index, task = waiting.pop()
            request = GenerationRequest(
                prompt=task.prompt_token_ids,
                max_new_tokens=task.max_new_tokens,
                ignore_eos=task.temperature > 0,
                sampling=SamplingParams(temperature=task.temperature, seed=index),
                speculation=speculation,
            )
            collector = EventCollector()
            async with contextlib.aclosing(client.stream(request)) as events:
                async for event in events:
                    collector.add(event)
            usages.append(collector.generation().usage)

    await asyncio.gather(*(one_stream() for _ in range(streams)))
    return sum(usage.output_tokens for usage in usages), usages


def through_services(
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    streams: int,
    *,
    name: str = "services",
    speculation: SpeculationParams,
    observe: Callable[[Sequence[Usage]], object] = lambda _: None,
) -> Variant:
    """The tasks through a gateway; tokens per second. `observe` gets each turn's usages."""

    async def turn() -> float:
        started_at_s = time.perf_counter()
        num_tokens, usages = await run_tasks(client, tasks, streams, speculation)
        duration_s = time.perf_counter() - started_at_s
        observe(usages)
        return num_tokens / duration_s

    return Variant(name=name, streams=streams, turn=turn)
