"""What an unforeseen exception of our own ends: one sequence, nothing, or the engine.

- One sequence, if the exception was raised while its command was handled, or while it was
  scheduled, sampled, scored or committed: the sequence is rejected with INTERNAL, and nothing that
  it computes from then on enters the prefix cache. A failing hint is dropped, nothing else. A
  session whose sink fails is ended.
- Nothing, if it was raised by an observer (`observation.py`) or by the depth policy, without which
  steps go on.
- The engine, if shared state can no longer be trusted: after a failed forward pass (K/V half
  written, out of memory, a device or another rank in an unknown state), a failed layout of a step,
  or a failed removal of a sequence from the scheduler. The thread ends with the error, and the
  process with it: clients receive UNAVAILABLE at once instead of wrong tokens or silence.

Each is logged once, with its sequence's id, and counted.
"""

from servicekit.errors import RequestError
from servicekit.logs import get_logger
from verifier.engine.observation import EngineObserver, Fault
from verifier.engine.sequence_table import SequenceTable
from verifier.errors import InternalError
from verifier.scheduling.scheduler import Scheduler
from verifier.scheduling.sequence import Sequence

logger = get_logger(__name__)


class FaultHandler:
    """Owned by the engine thread."""

    def __init__(
        self, table: SequenceTable, scheduler: Scheduler, observer: EngineObserver
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._observer = observer

    def fail(self, sequence: Sequence, fault: Fault, error: Exception) -> None:
        """Rejects the sequence that the fault was met with. A RequestError is its client's fault:
        it is reported as it is, and not counted.
        """
        if isinstance(error, RequestError):
            self._table.reject(sequence, error)
            return
        self.record(fault, error, sequence.sequence_id)
        # Tokens computed since the last whole cached block may be wrong: they are not cached.
        sequence.num_computed_tokens = sequence.num_entered_blocks * self._scheduler.block_size
        self._table.reject(sequence, InternalError())

    def record(self, fault: Fault, error: Exception, sequence_id: str = "") -> None:
        """Logs and counts a fault that the engine survives."""
        logger.error("engine_fault", during=fault.value, sequence_id=sequence_id, exc_info=error)
        self._observer.fault_met(fault)
