"""The engine's commands: any thread queues them, the engine thread handles them between steps."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future

from verifier.drafters.drafters import Drafters
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterBack,
    DrafterDown,
    DrafterLate,
    DrafterUp,
)
from verifier.drafts.draft_buffer import DraftBuffer, Hint, HintOutcome
from verifier.drafts.draft_wait import DraftWaitEstimates
from verifier.engine.faults import FaultHandler
from verifier.engine.messages import (
    AttachSession,
    Call,
    Close,
    Command,
    DetachSession,
    Forget,
    Hints,
    Open,
    Stop,
    Update,
    WhenIdle,
)
from verifier.engine.observation import EngineObserver, Fault
from verifier.engine.sequence_table import SequenceTable
from verifier.errors import InternalError
from verifier.scheduling.sequence import Sequence


class Inbox:
    """`put` and `num_pending` are for any thread, all else is for the engine thread.

    Commands take effect in the order in which they were queued.
    """

    def __init__(
        self,
        table: SequenceTable,
        *,
        drafters: Drafters,
        hint_counts: dict[HintOutcome, int],
        estimates: DraftWaitEstimates,
        faults: FaultHandler,
        observer: EngineObserver,
        admit: Callable[[], None],
    ) -> None:
        self.is_stopping = False
        self._table = table
        self._estimates = estimates
        self._faults = faults
        self._observer = observer
        self._admit = admit
        self._drafters = drafters
        self._hint_counts = hint_counts
        # When the last forward pass began.
        self.computing_since_s = 0.0
        # Whether to try to admit waiting sequences before an Open is refused for a full queue.
        # False once that made no room; True again with each `handle`, and when a sequence ends.
        self._may_admit = True
        # The last hop that no step delayed; 0: none since the engine reset this.
        self.round_trip_s = 0.0
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._idle_futures: list[Future[None]] = []

    @property
    def num_pending(self) -> int:
        return self._commands.qsize()

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def handle(self, timeout_s: float | None) -> None:
        """Handles all queued commands; waits up to `timeout_s` for the first (None: for ever)."""
        try:
            command = self._commands.get(timeout_s != 0, timeout_s or None)
        except queue.Empty:
            return
        # Commands that are queued meanwhile wait for the next step, so that a client that sends
        # without end delays nobody.
        num_more = self._commands.qsize()
        self._may_admit = True
        self._handle(command)
        for _ in range(num_more):
            self._handle(self._commands.get_nowait())

    def resolve_idle(self) -> None:
        """Answers `WhenIdle` if no sequence is open."""
        if self._table.is_empty:
            for future in self._idle_futures:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._idle_futures.clear()

    def _handle(self, command: Command) -> None:
        match command:
            case Open() | Close() | Update():
                self._handle_for_sequence(command)
            case DrafterAnswered():
                self._handle_answer(command)
            case DrafterUp() | DrafterBack() | DrafterLate() | DrafterDown():
                self._drafters.notice(command)
            case Hints():
                self._handle_hints(command)
            case Forget():
                self._faults.record(Fault.PUBLISH, command.error, command.sequence_id)
                self._table.forget(command)
                self._may_admit = True
            case AttachSession():
                self._table.attach(command.session_id, command.sink)
            case DetachSession():
                self._table.detach(command.session_id)
                self._may_admit = True
            case Call():
                command.run()
            case WhenIdle():
                self._idle_futures.append(command.future)
            case Stop():
                self.is_stopping = True

    def _handle_for_sequence(self, command: Open | Close | Update) -> None:
        """Handles a command of one sequence; an exception ends that sequence alone."""
        try:
            match command:
                case Open():
                    if self._may_admit and self._table.is_full(command.sequence):
                        # The first sequences of a burst may run at once and make room. If they
                        # cannot, those behind them cannot either, until others end.
                        self._admit()
                        self._may_admit = not self._table.is_full(command.sequence)
                    self._table.open(command)
                case Close():
                    self._table.close(command)
                    self._may_admit = True
                case Update():
                    self._table.update(command)
        except Exception as error:
            if isinstance(command, Open):
                self._faults.record(Fault.COMMAND, error, command.sequence.sequence_id)
                self._table.refuse(command, InternalError())
            elif sequence := self._table.find(command.session_id, command.sequence_id):
                self._faults.fail(sequence, Fault.COMMAND, error)

    def _handle_answer(self, command: DrafterAnswered) -> None:
        """Buffers what a drafter proposes; a fault of ours costs it its stream."""
        try:
            answer = self._drafters.answered(command)
        except Exception as error:
            self._faults.record(Fault.COMMAND, error)
            command.link.fail(command.epoch, "internal error")
            return
        for sequence, hint in answer.hints:
            self._offer(sequence, hint)
        if answer.hints and answer.sent_s is not None:
            self._observe_hop(answer.sent_s, command.received_at_s)

    def _handle_hints(self, command: Hints) -> None:
        """Buffers what a session proposes, for sequences that have no drafter."""
        sent_s: float | None = None
        for hint in command.hints:
            sequence = self._table.find(command.session_id, hint.sequence_id)
            if sequence is None or sequence.names_drafter:
                continue
            if self._offer(sequence, hint):
                for length, at_s in sequence.publications:
                    if length == hint.base_length:
                        sent_s = at_s
        if sent_s is not None:
            self._observe_hop(sent_s, command.received_at_s)

    def _offer(self, sequence: Sequence, hint: Hint) -> bool:
        """Offers a hint to its sequence; a fault of ours costs it this hint. Returns whether it is
        the first for its length.
        """
        try:
            if sequence.hint_log is not None:
                sequence.hint_log.append(hint)
            return sequence.can_draft and self._buffer(sequence, hint)
        except Exception as error:
            self._faults.record(Fault.COMMAND, error, sequence.sequence_id)
            sequence.draft_buffer = DraftBuffer()
            return False

    def _buffer(self, sequence: Sequence, hint: Hint) -> bool:
        buffer, known = sequence.draft_buffer, sequence.token_ids
        is_first = buffer.answered_length < hint.base_length <= len(known)
        if is_first and (hint.token_ids or not hint.is_indexing):
            sequence.hint_record.record_hint(hint.base_length, hint.token_ids, known)
        outcome = buffer.offer(
            hint.base_length, hint.token_ids, hint.matched_ngram_length, known, hint.source,
            resumes=sequence.resumes_hints,
        )  # fmt: skip
        if outcome is not None:
            self._hint_counts[outcome] += 1
        return is_first

    def _observe_hop(self, sent_s: float, received_at_s: float) -> None:
        """Observes a hop: it ends where the engine has the hint, unless a step came before that."""
        if self.computing_since_s < sent_s:
            received_at_s = time.monotonic()
        was_under_step = sent_s <= self.computing_since_s <= received_at_s
        hop_s = received_at_s - sent_s
        self._estimates.observe_hop(hop_s, was_under_step=was_under_step)
        if not was_under_step:
            self.round_trip_s = hop_s
            self._observer.hop_measured(hop_s)
