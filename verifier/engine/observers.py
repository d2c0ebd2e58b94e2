"""Tells the engine's observers, so that none of them can harm it or the others.

Owns what becomes of an observer that fails: it is told on, which method of which observer fails is
logged once, and every time is counted.
"""

import contextlib

from servicekit.logs import get_logger
from verifier.drafts.draft_buffer import HintOutcome
from verifier.engine.engine import EngineLoad, EngineObserver, StepRecord
from verifier.engine.faults import Fault

logger = get_logger(__name__)


class Observers:
    """An `EngineObserver` that tells several, in order."""

    def __init__(self, observers: list[EngineObserver]) -> None:
        self._observers = observers
        # By observer and method.
        self._logged: set[tuple[int, str]] = set()

    def stepped(self, record: StepRecord) -> None:
        self._tell("stepped", record)

    def hint_ended(self, outcome: HintOutcome) -> None:
        self._tell("hint_ended", outcome)

    def hop_measured(self, duration_s: float) -> None:
        self._tell("hop_measured", duration_s)

    def settled(self, load: EngineLoad) -> None:
        self._tell("settled", load)

    def fault_met(self, fault: Fault) -> None:
        self._tell("fault_met", fault)

    def _tell(self, method: str, news: object) -> None:
        for index, observer in enumerate(self._observers):
            try:
                getattr(observer, method)(news)
            except Exception:
                if (index, method) not in self._logged:
                    self._logged.add((index, method))
                    logger.exception("observer_failed", observer=repr(observer), method=method)
                self._count_own_fault()

    def _count_own_fault(self) -> None:
        for observer in self._observers:
            with contextlib.suppress(Exception):  # whoever cannot count has been logged
                observer.fault_met(Fault.OBSERVE)
