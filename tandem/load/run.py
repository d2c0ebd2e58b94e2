"""Sends requests: a number at a time, or as they arrive by themselves.

Arrivals of many independent users are a Poisson process: they do not wait for answers.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.load.answer import Answer
from tandem.load.endpoints import Endpoint
from tandem.load.workloads import Prompt

# More arrivals than that in flight are counted as failed, not sent.
MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """When a turn ends: after this many requests or seconds, whichever is set and comes first.

    Requests that have been sent are always answered.
    """

    requests: int | None = None
    seconds: float | None = None


def poisson_arrivals_s(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Times of a Poisson process from 0 on, without end."""
    draw = random.Random(seed)
    return itertools.accumulate(draw.expovariate(rate_per_s) for _ in itertools.count())


async def run_turn(
    endpoint: Endpoint,
    prompts: Iterator[Prompt],
    amount: Amount,
    *,
    concurrency: int,
    rate_per_s: float | None = None,
    seed: int = 0,
    speculates: bool = True,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Sends the next prompts; returns all answers.

    Args:
        prompts: without end.
        concurrency: how many requests run at a time, without a rate.
        rate_per_s: mean arrivals per second; latencies then count from the arrival.
        seed: of the arrivals.
        on_answer: called for each answer.
    """
    started_at_s = time.perf_counter()
    answers: list[Answer] = []
    pending = itertools.islice(prompts, amount.requests)

    def is_over(now_s: float) -> bool:
        return amount.seconds is not None and now_s - started_at_s >= amount.seconds

    async def send(prompt: Prompt, arrived_at_s: float) -> None:
        late_s = time.perf_counter() - arrived_at_s
        answer = await endpoint.answer(prompt, speculates=speculates, arrived_at_s=arrived_at_s)
        answer.sent_late_s = late_s
        answers.append(answer)
        on_answer(answer)

    async def send_one_after_another() -> None:
        for prompt in pending:
            now_s = time.perf_counter()
            if is_over(now_s):
                return
            await send(prompt, now_s)

    async with asyncio.TaskGroup() as group:
        if rate_per_s is None:
            for _ in range(concurrency):
                group.create_task(send_one_after_another())
            return answers
        in_flight: set[asyncio.Task[None]] = set()
        for prompt, after_s in zip(
            pending, poisson_arrivals_s(rate_per_s, seed=seed), strict=False
        ):
            # Also by the clock: this process may be behind the arrivals.
            if is_over(max(started_at_s + after_s, time.perf_counter())):
                break
            await asyncio.sleep(started_at_s + after_s - time.perf_counter())
            if len(in_flight) >= MAX_IN_FLIGHT:
                answers.append(Answer(error=f"not sent: {MAX_IN_FLIGHT} requests in flight"))
                on_answer(answers[-1])
                continue
            task = group.create_task(send(prompt, started_at_s + after_s))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    return answers
