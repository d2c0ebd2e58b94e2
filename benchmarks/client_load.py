"""Load on a gateway: tasks through its client, a number of streams at a time."""

import asyncio
import contextlib
from collections.abc import Sequence

from benchmarks.workloads import Task
from tandem.client import (
    AsyncTandemClient,
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
    Usage,
)
from tandem.generation import EventCollector


async def run_tasks(
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    streams: int,
    speculation: SpeculationParams,
    structured_output: StructuredOutput | None = None,
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
                sampling=SamplingParams(
                    temperature=task.temperature, seed=index, structured_output=structured_output
                ),
                speculation=speculation,
            )
            collector = EventCollector()
            async with contextlib.aclosing(client.stream(request)) as events:
                async for event in events:
                    collector.add(event)
            usages.append(collector.generation().usage)

    await asyncio.gather(*(one_stream() for _ in range(streams)))
    return sum(usage.output_tokens for usage in usages), usages
