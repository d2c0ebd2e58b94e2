"""What can be seen of the engine: its load, a record of every step, its own faults, profiles.

Metrics and tests are observers. `Observers` protects the engine and the others from one that
raises: it is called again the next time, each of its methods that failed is logged once, and every
failure is counted.
"""

import contextlib
import enum
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from servicekit.logs import get_logger
from verifier.batch.batch_layout import BatchLayout
from verifier.drafts.draft_buffer import HintOutcome
from verifier.engine.messages import StepStats
from verifier.sampling.rejection_sampler import Verdict
from verifier.scheduling.scheduler import ScheduledSequence

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Fault(enum.StrEnum):
    """What failed, of the faults that the engine survives (`faults.py`); the label of
    `tandem_verifier_internal_errors`.
    """

    COMMAND = "command"  # handling one command
    SCHEDULE = "schedule"  # admitting or scheduling one sequence
    VERIFY = "verify"  # sampling one sequence's tokens
    SCORE = "score"  # scoring one sequence's rows
    COMMIT = "commit"  # moving one sequence forward
    PUBLISH = "publish"  # handing one session its events, or writing one of them
    OBSERVE = "observe"  # calling an observer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot, replaced after every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_total: int = 0
    # Totals since the start.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    # Running means.
    step_duration_s: float = 0.0
    hop_duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything about a step that an observer may need."""

    # In the order of `StepBatch.scheduled`: the verdict's sequences come first.
    scheduled: list[ScheduledSequence]
    layout: BatchLayout
    verdict: Verdict
    stats: StepStats
    # Seconds by phase: schedule (with layout), forward, verify, commit (with publish).
    phase_durations_s: dict[str, float]


class EngineObserver(Protocol):
    """Called by the engine thread; must be quick."""

    def stepped(self, record: StepRecord) -> None: ...

    def hint_ended(self, outcome: HintOutcome) -> None: ...

    def hop_measured(self, duration_s: float) -> None: ...

    def settled(self, load: EngineLoad) -> None: ...

    def fault_met(self, fault: Fault) -> None: ...


class Observers:
    """An `EngineObserver` that calls several, in order."""

    def __init__(self, observers: list[EngineObserver]) -> None:
        self._observers = observers
        # By observer and method.
        self._logged: set[tuple[int, str]] = set()
        self.stepped: Callable[[StepRecord], None] = partial(self._call, "stepped")
        self.hint_ended: Callable[[HintOutcome], None] = partial(self._call, "hint_ended")
        self.hop_measured: Callable[[float], None] = partial(self._call, "hop_measured")
        self.settled: Callable[[EngineLoad], None] = partial(self._call, "settled")
        self.fault_met: Callable[[Fault], None] = partial(self._call, "fault_met")

    def _call(self, method: str, argument: object) -> None:
        for index, observer in enumerate(self._observers):
            try:
                getattr(observer, method)(argument)
            except Exception:
                if (index, method) not in self._logged:
                    self._logged.add((index, method))
                    logger.exception("observer_failed", observer=repr(observer), method=method)
                self._count_failure()

    def _count_failure(self) -> None:
        for observer in self._observers:
            with contextlib.suppress(Exception):  # an observer that cannot count has been logged
                observer.fault_met(Fault.OBSERVE)


class PhaseClock:
    """Durations of the phases of one step, by name."""

    def __init__(self) -> None:
        self.durations_s: dict[str, float] = {}
        self._started_at_s = self._phase_started_at_s = time.perf_counter()

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started_at_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.durations_s[phase] = now_s - self._phase_started_at_s
        self._phase_started_at_s = now_s


def ranged(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls the function, while a profile is recorded inside the range `tandem.<name>`.

    The range is seen by torch's profiler, and by NVTX through `emit_nvtx`. A profile covers the
    thread that started it: start and stop one through `Engine.call`. Without a profile no range is
    entered, since that would take microseconds in every step.
    """
    # Who profiles has imported it.
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return function(*args, **kwargs)
    with profiler.record_function(f"tandem.{name}"):
        return function(*args, **kwargs)
