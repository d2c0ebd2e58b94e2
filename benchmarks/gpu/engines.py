"""The engine in this process: what drafts bring and cost."""

from collections.abc import AsyncIterator, Sequence

from benchmarks.gpu.bench import REPLAYED, Bench
from benchmarks.gpu.texts import Text, random_texts, replays
from benchmarks.in_process import through_engine
from benchmarks.report import Goal, Measure
from benchmarks.workloads import Task

SPECULATION_GOAL = 2.5
RANDOM_GOAL = 0.98


def tasks_for(texts: Sequence[Text], streams: int) -> list[Task]:
    """The tasks of a turn: two for each stream unless that is many."""
    count = max(streams, min(2 * streams, 64))
    return [task for task, _ in texts[:count]]


async def measure_speculation(bench: Bench) -> AsyncIterator[Measure]:
    """Replayed code edits with drafts over without."""
    texts = replays(bench.size.max_new_tokens)
    for streams in bench.size.streams[:2]:
        yield await _on_over_off(
            bench, "speculation", "code edits", texts, streams, SPECULATION_GOAL
        )


async def measure_random(bench: Bench) -> AsyncIterator[Measure]:
    """Text that never repeats, with drafts over without."""
    texts = random_texts(bench.size.max_new_tokens)
    for streams in bench.size.streams:
        yield await _on_over_off(
            bench, "random", "text that never repeats", texts, streams, RANDOM_GOAL
        )


async def _on_over_off(
    bench: Bench, row: str, what: str, texts: Sequence[Text], streams: int, goal: float
) -> Measure:
    tasks = tasks_for(texts, streams)
    with bench.engine(bench.size.small) as engine:
        on, off = (
            through_engine(
                engine,
                tasks,
                streams,
                name=name,
                speculate=name == "on",
                leaves_out_drafting=True,
            )
            for name in ("on", "off")
        )
        await bench.compare(on, off)
    name = f"{bench.size.small.name}: {what}, on / off"
    note = f"{REPLAYED}; without the time of drafting"
    return bench.ratio(row, name, on, off, Goal(value=goal), note)
