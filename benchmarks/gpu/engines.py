"""The engine in this process: what drafts bring and cost, and its time outside the model."""

import statistics
from collections.abc import AsyncIterator, Sequence

from benchmarks.gpu.bench import REPLAYED, Bench, counting_down, variant
from benchmarks.gpu.texts import Text, random_texts, replays
from benchmarks.in_process import InProcessEngine, StepTimes
from benchmarks.ratios import median_interval
from benchmarks.serving.turns import Goal, Measure
from benchmarks.workloads import Task

SPECULATION_GOAL = 2.5
RANDOM_GOAL = 0.98
HOST_GOAL_MS = 0.8
_FULL = 0.9


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
    """Time of a step outside the forward pass, drafting aside, with drafts and without."""
    with bench.engine(bench.size.small) as engine:
        for num_left, speculate in counting_down((True, False)):
            yield await _host(bench, engine, speculate=speculate, num_left=num_left)


async def _host(
    bench: Bench, engine: InProcessEngine, *, speculate: bool, num_left: int
) -> Measure:
    streams = bench.size.host_streams
    # More than streams, so that most steps have all.
    tasks = [task for task, _ in replays(bench.size.max_new_tokens)[: 2 * streams]]
    phases: dict[str, list[float]] = {}

    def host_ms() -> float:
        steps: list[StepTimes] = []
        engine.run(tasks, streams=streams, speculate=speculate, observe_step=steps.append)
        spent = full_step_ms(steps, streams)
        for phase, duration_ms in spent.items():
            phases.setdefault(phase, []).append(duration_ms)
        # Drafting is the benchmark's own.
        return sum(spent.values()) - spent["draft"] - spent["forward"]

    host = variant("host", streams, host_ms, unit="ms")
    await bench.compare(host, num_left=num_left)
    medians = {phase: statistics.median(each) for phase, each in phases.items()}
    spent = ", ".join(f"{phase} {ms:.3g}" for phase, ms in medians.items())
    return bench.measure(
        "host",
        f"a step of {bench.size.small.name} outside its forward pass, {drafts_in(speculate)}",
        streams,
        median_interval(host.figures),
        unit="ms",
        goal=Goal(value=HOST_GOAL_MS, is_most=True),
        note=f"{spent} ms; {REPLAYED}",
    )


def drafts_in(speculate: bool) -> str:
    return "with drafts" if speculate else "without drafts"


def full_step_ms(steps: Sequence[StepTimes], streams: int) -> dict[str, float]:
    """Milliseconds by phase, and of drafting: means over the steps that sample nine in ten of the
    streams; others are of a prefill, or of a run's end.

    Raises:
        RuntimeError: there is none.
    """
    full = [step for step in steps if step.num_sampled >= _FULL * streams]
    if not full:
        raise RuntimeError(f"no step sampled {_FULL:.0%} of {streams} sequences")
    spent = [{**step.phase_durations_s, "draft": step.draft_s} for step in full]
    return {phase: statistics.fmean(each[phase] for each in spent) * 1e3 for phase in spent[0]}


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
                bench.generating(
                    name, engine, tasks, streams, speculate=name == "on", leaves_out_drafting=True
                )
                for name in ("on", "off")
            )
            await bench.compare(on, off, num_left=num_left)
            name = f"{bench.size.small.name}: {what}"
            note = f"{REPLAYED}; without the time of drafting"
            yield bench.ratio(row, name, on, off, Goal(value=goal), note)
