"""The simulation of draft flow against the measured system: same texts, measured costs.

Twice: the engine in process, whose hints take no time, and the whole stack with its hop. Where the
first agrees and the second does not, the simulation misses something about the way to the drafter
and back, or about what services cost each other on shared cores.
"""

import asyncio
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.in_process import InProcessEngine
from benchmarks.metrics import read_metrics
from benchmarks.ratios import Interval, interval, ratios
from benchmarks.serving.draft_flow import Costs, Text, simulate
from benchmarks.serving.hop import Hop, hop_between
from benchmarks.serving.setting import Setting
from benchmarks.serving.turns import Measure, RowResult, Variant, by_turns
from benchmarks.workloads import Task
from tandem.client import Usage
from verifier.config import VerifierConfig
from verifier.engine.messages import Decided
from verifier.engine.observation import StepRecord

STREAMS = dict.fromkeys((1, 16), 1.0)
# Steps with about the same number of rows that make a point of the cost curve.
_STEPS_PER_POINT = 20


class TimedEngine(InProcessEngine):
    """Keeps rows and seconds of every step, drafting left out."""

    def __init__(self, config: VerifierConfig) -> None:
        self.steps: list[tuple[int, float]] = []
        super().__init__(config)

    def stepped(self, record: StepRecord) -> None:
        # The base class begins to count the next step's.
        duration_s = sum(record.phase_durations_s.values()) - sum(self._drafted_s.values())
        self.steps.append((record.layout.num_tokens, duration_s))
        super().stepped(record)


@dataclass(slots=True, kw_only=True)
class Observed:
    """What each turn of a variant showed beside its speed; the first is the warm-up's."""

    hops: list[Hop] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)

    @property
    def hop_s(self) -> float:
        return statistics.median(hop.p50_s for hop in self.hops[1:])

    @property
    def step_s(self) -> float:
        return statistics.median(hop.mean_step_s for hop in self.hops[1:])

    @property
    def tokens_per_step(self) -> float:
        return self._total("output_tokens") / self._total("num_steps")

    @property
    def share_without_draft(self) -> float:
        return 1 - self._total("num_drafts") / self._total("num_steps")

    def _total(self, count: str) -> int:
        return sum(getattr(usage, count) for usage in self.usages)


async def measure(setting: Setting) -> RowResult:
    stack, client = await setting.stack()
    verifier = stack.services["verifier"].metrics
    config = VerifierConfig.model_validate(
        {
            "model": setting.model,
            "device": "cpu",
            "dtype": setting.dtype,
            "threads": setting.threads,
            "prefix_cache": False,
        }
    )
    measures: list[Measure] = []
    variants: list[Variant] = []
    with TimedEngine(config).started() as engine:
        assert isinstance(engine, TimedEngine)
        for streams in setting.chosen(STREAMS):
            tasks = setting.renames(streams)
            texts = await asyncio.to_thread(_answers, engine, tasks, streams)
            engine.steps.clear()
            seen_on, seen_off = Observed(), Observed()
            mean_steps_s: dict[bool, list[float]] = {True: [], False: []}
            on, off = (
                _observed(
                    setting.through_services(
                        client,
                        tasks,
                        streams,
                        speculate=seen is seen_on,
                        name="on" if seen is seen_on else "off",
                        observe=seen.usages.extend,
                    ),
                    verifier,
                    seen,
                )
                for seen in (seen_on, seen_off)
            )
            engine_on, engine_off = (
                _in_process(engine, tasks, streams, speculate, mean_steps_s[speculate])
                for speculate in (True, False)
            )
            each = [on, off, engine_on, engine_off]
            await by_turns(each, setting.amount.rounds, setting.say)
            step_s = cost_curve(engine.steps)
            longer_s = max(0.0, seen_off.step_s - statistics.median(mean_steps_s[False][1:]))
            turnaround_s = await _turnaround_s(setting, tasks, step_s)
            for what, measured, costs, note in (
                (
                    "engine in process",
                    (engine_on, engine_off),
                    Costs(step_s=step_s, hop_s=0.0),
                    "",
                ),
                (
                    "whole stack",
                    (on, off),
                    Costs(
                        step_s=_plus(longer_s, step_s),
                        hop_s=seen_on.hop_s,
                        turnaround_s=turnaround_s,
                    ),
                    f"; measured {seen_on.tokens_per_step:.1f}, "
                    f"{seen_on.share_without_draft:.0%}; hop {seen_on.hop_s * 1e3:.2f} ms, "
                    f"{turnaround_s * 1e3:.1f} ms between requests, {longer_s * 1e3:.2f} ms more "
                    "per step than in process",
                ),
            ):
                flow, plain = (
                    simulate(texts, costs, streams=streams, speculate=speculate)
                    for speculate in (True, False)
                )
                gains = ratios(measured[0].figures, measured[1].figures)
                gain = flow.tokens_per_s / plain.tokens_per_s
                measures.append(
                    Measure(
                        row="simulation",
                        what=f"{what}, gain of drafts, simulated / measured, renames",
                        streams=streams,
                        dtype=setting.dtype,
                        value=_over_median(gain, gains),
                        note=f"gain {gain:.2f} simulated, {statistics.median(gains):.2f} "
                        f"measured; on {flow.tokens_per_s:,.0f} and {measured[0].median:,.0f}, "
                        f"off {plain.tokens_per_s:,.0f} and {measured[1].median:,.0f} tokens/s; "
                        f"{flow.tokens_per_turn:.1f} tokens per step simulated, "
                        f"{flow.num_turns_without_draft / flow.num_turns:.0%} of the steps "
                        f"without a draft{note}",
                    )
                )
            variants += each
    return RowResult(measures=measures, variants=variants)


def cost_curve(steps: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds of a step by its rows: means of steps with about as many, straight lines between.

    Means, since a run's time is that of all its steps, also of those that were interrupted. Beyond
    the largest step seen, the time grows as the rows do.

    Args:
        steps: rows and seconds of each.
    """
    by_rows: dict[int, list[float]] = defaultdict(list)
    for num_rows, duration_s in steps:
        by_rows[num_rows].append(duration_s)
    points: list[tuple[float, float]] = []
    rows: list[int] = []
    durations_s: list[float] = []
    for num_rows in sorted(by_rows):
        rows += [num_rows] * len(by_rows[num_rows])
        durations_s += by_rows[num_rows]
        if len(rows) >= _STEPS_PER_POINT or num_rows == max(by_rows):
            points.append((statistics.mean(rows), statistics.mean(durations_s)))
            rows, durations_s = [], []
    at, took_s = [at for at, _ in points], [duration_s for _, duration_s in points]

    def step_s(num_rows: int) -> float:
        within_s = float(np.interp(num_rows, at, took_s))
        return within_s * max(1.0, num_rows / at[-1])

    return step_s


def _plus(seconds: float, step_s: Callable[[int], float]) -> Callable[[int], float]:
    # What services add to a step is for its messages, however many rows it has.
    return lambda num_rows: seconds + step_s(num_rows)


def _over_median(value: float, measured: Sequence[float]) -> Interval:
    return interval(
        lambda rounds: value / statistics.median(measured[i] for i in rounds), len(measured)
    )


def _answers(engine: TimedEngine, tasks: Sequence[Task], streams: int) -> list[Text]:
    """What the model answers."""
    outputs: list[list[int]] = [[] for _ in tasks]

    def observe(decided: Decided) -> None:
        outputs[int(decided.sequence_id)] += decided.token_ids

    engine.run(tasks, streams=streams, speculate=True, observe=observe)
    return [
        Text(prompt=task.prompt_token_ids, output=output)
        for task, output in zip(tasks, outputs, strict=True)
    ]


def _in_process(
    engine: TimedEngine,
    tasks: Sequence[Task],
    streams: int,
    speculate: bool,
    mean_steps_s: list[float],
) -> Variant:
    """The tasks in this process; appends the mean duration of each turn's steps."""

    async def turn() -> float:
        num_steps = len(engine.steps)
        started_at_s = time.perf_counter()
        counts = await asyncio.to_thread(engine.run, tasks, streams=streams, speculate=speculate)
        duration_s = time.perf_counter() - started_at_s
        mean_steps_s.append(statistics.mean(step_s for _, step_s in engine.steps[num_steps:]))
        return counts.num_tokens / duration_s

    name = f"in process, {'on' if speculate else 'off'}"
    return Variant(name=name, streams=streams, turn=turn)


def _observed(variant: Variant, verifier: str, seen: Observed) -> Variant:
    """The same, and keeps each turn's hop and steps."""

    async def turn() -> float:
        before = await asyncio.to_thread(read_metrics, verifier)
        figure = await variant.turn()
        seen.hops.append(hop_between(before, await asyncio.to_thread(read_metrics, verifier)))
        return figure

    return dataclasses.replace(variant, turn=turn)


async def _turnaround_s(
    setting: Setting, tasks: Sequence[Task], step_s: Callable[[int], float]
) -> float:
    """What a request takes beside its steps: that of one token, less its prompt's steps."""
    _, client = await setting.stack()
    short = [dataclasses.replace(task, max_new_tokens=1) for task in tasks]
    through = setting.through_services(client, short, 1, speculate=False)
    per_request_s = []
    for _ in range(setting.amount.rounds):
        per_request_s.append(1 / await through.turn())
    prompts_s = statistics.mean(step_s(len(task.prompt_token_ids)) for task in tasks)
    return max(0.0, statistics.median(per_request_s) - prompts_s)
