"""The engine in this process: what drafts bring and cost, and its time outside the model."""

import statistics
from collections.abc import AsyncIterator, Sequence

from benchmarks.gpu.bench import REPLAYED, Bench, counting_down, variant
from benchmarks.gpu.texts import Text, random_texts, replays
from benchmarks.ratios import median_interval
from benchmarks.serving.turns import Goal, Measure
from benchmarks.workloads import Task

SPECULATION_GOAL = 2.5
RANDOM_GOAL = 0.98
HOST_GOAL_MS = 0.8


def tasks_for(texts: Sequence[Text], streams: int) -> list[Task]:
    """The tasks of a turn: two for each stream unless that is many."""
    count = max(streams, min(2 * streams, 64))
    return [task for task, _ in texts[:count]]


async def measure_speculation(bench: Bench) -> AsyncIterator[Measure]:
    """Replayed code edits with drafts over without."""
    texts = replays(bench.size.max_new_tokens)
    what = "code edits, on / off"
    streams = bench.size.streams[:2]
    async for measure in _on_over_off(bench, "speculation", what, texts, streams, SPECULATION_GOAL):
        yield measure


async def measure_random(bench: Bench) -> AsyncIterator[Measure]:
    """Text that never repeats, with drafts over without."""
    texts = random_texts(bench.size.max_new_tokens)
    what = "text that never repeats, on / off"
    async for measure in _on_over_off(
        bench, "random", what, texts, bench.size.streams, RANDOM_GOAL
    ):
        yield measure


async def measure_host(bench: Bench) -> AsyncIterator[Measure]:
    """Time of a step outside the forward pass, drafting aside."""
    streams = bench.size.host_streams
    tasks = tasks_for(replays(bench.size.max_new_tokens), streams)
    phases: dict[str, list[float]] = {}
    with bench.engine(bench.size.small) as engine:

        def host_ms() -> float:
            counts = engine.run(tasks, streams=streams, speculate=True)
            spent = counts.phase_durations_s
            # Drafting is the benchmark's own; it is part of the phase that publishes, too.
            host_s = sum(spent.values()) - 2 * spent.get("draft", 0.0) - spent["forward"]
            for phase, duration_s in spent.items():
                phases.setdefault(phase, []).append(duration_s / counts.num_steps * 1e3)
            return host_s / counts.num_steps * 1e3

        host = variant("host", streams, host_ms, unit="ms")
        await bench.compare(host)
    medians = {phase: statistics.median(each) for phase, each in phases.items()}
    yield bench.measure(
        "host",
        f"a step of {bench.size.small.name} outside its forward pass",
        streams,
        median_interval(host.figures),
        unit="ms",
        goal=Goal(value=HOST_GOAL_MS, is_most=True),
        note=", ".join(f"{phase} {ms:.3g}" for phase, ms in medians.items()) + f" ms; {REPLAYED}",
    )


async def _on_over_off(
    bench: Bench,
    row: str,
    what: str,
    texts: Sequence[Text],
    all_streams: Sequence[int],
    goal: float,
) -> AsyncIterator[Measure]:
    with bench.engine(bench.size.small) as engine:
        for num_left, streams in counting_down(all_streams):
            tasks = tasks_for(texts, streams)
            on, off = (
                bench.generating(name, engine, tasks, streams, speculate=name == "on")
                for name in ("on", "off")
            )
            await bench.compare(on, off, num_left=num_left)
            name = f"{bench.size.small.name}: {what}"
            yield bench.ratio(row, name, on, off, Goal(value=goal), REPLAYED)
