"""What can be seen of the engine: its load, a record of every step, its own faults, profiles.

Metrics and tests are observers. `Observers` protects the engine and the others from one that
raises: it is called again the next time, each of its methods that failed is logged once, and every
failure is counted.
"""

import contextlib
import enum
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from servicekit.logs import get_logger
from verifier.batch.batch_layout import BatchLayout
from verifier.drafters.messages import DrafterFault, DrafterState
from verifier.drafts.depth_policy import DepthOutcome
from verifier.drafts.draft_buffer import HintOutcome
from verifier.drafts.draft_wait import WaitOutcome
from verifier.engine.messages import StepStats
from verifier.sampling.rejection_sampler import Verdict
from verifier.scheduling.scheduler import ScheduledSequence

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


#: The parts of a step, in order: schedule (with layout, and what sampling needs), forward (from the
#: launch), verify, commit.
PHASES = ("schedule", "forward", "verify", "commit")


class Fault(enum.StrEnum):
    """What failed, of the faults that the engine survives (`faults.py`); the label of
    `tandem_verifier_internal_errors`.
    """

    COMMAND = "command"  # handling one command
    SCHEDULE = "schedule"  # admitting or scheduling one sequence, or the depth policy
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
    num_waiting_tokens: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_total: int = 0
    # Totals since the start.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    # Hints that were used, or passed or contradicted by their sequences.
    num_hints: Mapping[HintOutcome, int] = field(default_factory=dict)
    # Running means.
    step_duration_s: float = 0.0
    hop_duration_s: float = 0.0
    # How many drafters are in each state.
    num_drafters: Mapping[DrafterState, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Everything about a step that an observer may need."""

    # In the order of `StepBatch.scheduled`: the verdict's sequences come first.
    scheduled: list[ScheduledSequence]
    layout: BatchLayout
    verdict: Verdict
    stats: StepStats
    # Seconds by phase, see `PHASES`.
    phase_durations_s: dict[str, float]
    # What the depth policy says of it when it has learned from it; None: there is no policy.
    speculation: DepthOutcome | None = None


class EngineObserver:
    """Called by the engine thread; must be quick. Does nothing unless overridden."""

    def stepped(self, record: StepRecord) -> None:
        """A step is over; the next one may be under way."""

    def hop_measured(self, duration_s: float) -> None:
        """A hint arrived `duration_s` after its request, and no step was computed in between."""

    def wait_ended(self, outcome: WaitOutcome) -> None:
        """A step has waited for hints."""

    def drafter_failed(self, fault: DrafterFault) -> None:
        """A drafter did something wrong."""

    def fault_met(self, fault: Fault) -> None:
        """The engine survived a fault of its own."""


class Observers(EngineObserver):
    """An `EngineObserver` that calls several, in order."""

    def __init__(self, observers: list[EngineObserver]) -> None:
        self._observers = observers
        # By observer and method.
        self._logged: set[tuple[int, str]] = set()

    def stepped(self, record: StepRecord) -> None:
        self._call("stepped", record)

    def hop_measured(self, duration_s: float) -> None:
        self._call("hop_measured", duration_s)

    def wait_ended(self, outcome: WaitOutcome) -> None:
        self._call("wait_ended", outcome)

    def drafter_failed(self, fault: DrafterFault) -> None:
        self._call("drafter_failed", fault)

    def fault_met(self, fault: Fault) -> None:
        self._call("fault_met", fault)

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
