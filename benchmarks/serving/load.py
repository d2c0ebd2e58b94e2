"""Latencies under requests that arrive by themselves, with and without speculation.

Arrivals are a Poisson process: they do not wait for answers, as those of many independent users do
not. Capacity is what the services take without drafts, 16 renames at a time; both variants get the
same arrivals, at a part of it. A latency is that of a whole turn's requests:

    TTFT  from the arrival to the first chunk
    ITL   from the first chunk to the last, per token after the first chunk's
    E2E   from the arrival to the end
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.client_load import run_tasks
from benchmarks.ratios import median_interval
from benchmarks.report import Measure
from benchmarks.serving.setting import Setting
from benchmarks.turns import Variant, by_turns, say
from benchmarks.workloads import Task
from tandem.client import AsyncTandemClient, Chunk, GenerationRequest, SpeculationParams
from tandem.load.run import poisson_arrivals_s

STREAMS = 16
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
LATENCIES = ("TTFT", "ITL", "E2E")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one turn's requests, in milliseconds, by name."""

    values: dict[str, list[float]]

    def quantile(self, name: str, q: float) -> float:
        ordered = sorted(self.values[name])
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def measure(setting: Setting) -> AsyncIterator[Measure]:
    _, client = await setting.stack()
    tasks = setting.renames(STREAMS)
    capacity = await _capacity(client, tasks)
    say(f"load: {capacity:.1f} requests/s is 100 %")
    for fraction in FRACTIONS:
        pair = [
            _variant(setting, client, tasks, fraction, capacity, speculate=speculate)
            for speculate in (True, False)
        ]
        await by_turns([variant for variant, _ in pair], setting.amount.load_rounds)
        for variant, turns in pair:
            for name in LATENCIES:
                # The first turn warmed up.
                medians = [turn.quantile(name, 0.5) for turn in turns[1:]]
                # A turn has 46 requests or more: hardly one of them is beyond a p99.
                last = statistics.median(turn.quantile(name, 0.9) for turn in turns[1:])
                yield Measure(
                    row="load",
                    what=f"{name} p50, {variant.name}",
                    streams=STREAMS,
                    dtype=setting.dtype,
                    value=median_interval(medians),
                    unit="ms",
                    note=f"p90 {last:.3g} ms, {capacity * fraction:.1f} requests/s",
                )


async def _capacity(client: AsyncTandemClient, tasks: Sequence[Task]) -> float:
    """Requests per second, without drafts."""
    rates = []
    for _ in range(3):
        started_at_s = time.perf_counter()
        await run_tasks(client, tasks, STREAMS, SpeculationParams(enabled=False))
        rates.append(len(tasks) / (time.perf_counter() - started_at_s))
    return statistics.median(rates)


def _variant(
    setting: Setting,
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    fraction: float,
    capacity: float,
    *,
    speculate: bool,
) -> tuple[Variant, list[Latencies]]:
    turns: list[Latencies] = []

    async def turn() -> float:
        # Both variants get the arrivals of their turn.
        arrivals_s = _arrivals(capacity * fraction, setting.amount.load_s, seed=len(turns))
        turns.append(await _serve(client, tasks, arrivals_s, speculate=speculate))
        return turns[-1].quantile("E2E", 0.5)

    name = f"speculation {'on' if speculate else 'off'}, at {fraction:.0%}"
    return Variant(name=name, streams=STREAMS, turn=turn, unit="ms"), turns


def _arrivals(per_s: float, duration_s: float, *, seed: int) -> list[float]:
    """Times of a Poisson process; one at least."""
    arrivals_s = poisson_arrivals_s(per_s, seed=seed)
    first_s = next(arrivals_s)
    return [first_s, *itertools.takewhile(lambda after_s: after_s < duration_s, arrivals_s)]


async def _serve(
    client: AsyncTandemClient,
    tasks: Sequence[Task],
    arrivals_s: Sequence[float],
    *,
    speculate: bool,
) -> Latencies:
    latencies = Latencies({name: [] for name in LATENCIES})
    started_at_s = time.perf_counter()

    async def serve_one(task: Task, arrival_s: float) -> None:
        await asyncio.sleep(started_at_s + arrival_s - time.perf_counter())
        request = GenerationRequest(
            prompt=task.prompt_token_ids,
            max_new_tokens=task.max_new_tokens,
            speculation=SpeculationParams(enabled=speculate),
        )
        first_s, num_later = 0.0, 0
        async with contextlib.aclosing(client.stream(request)) as events:
            async for event in events:
                if not isinstance(event, Chunk):
                    continue
                last_s = time.perf_counter() - started_at_s
                if not first_s:
                    first_s = last_s
                else:
                    num_later += len(event.token_ids)
        latencies.values["TTFT"].append((first_s - arrival_s) * 1e3)
        latencies.values["E2E"].append((last_s - arrival_s) * 1e3)
        if num_later:
            latencies.values["ITL"].append((last_s - first_s) / num_later * 1e3)

    await asyncio.gather(
        *(
            serve_one(tasks[index % len(tasks)], arrival_s)
            for index, arrival_s in enumerate(arrivals_s)
        )
    )
    return latencies
