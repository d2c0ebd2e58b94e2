"""The open sequences, and the events queued for their sessions.

Turns commands into sequences in the scheduler, and collects events until they are flushed, one
batch per session and step. Every Open ends in exactly one terminal event.
"""

import collections
import dataclasses

from servicekit.errors import RequestError
from tandem.values import FinishReason
from verifier.drafters.drafters import Drafters, FedDrafter
from verifier.drafters.messages import DrafterState
from verifier.drafts.hint_log import HintLog
from verifier.drafts.useless_hints import UselessHintsPrior
from verifier.engine.messages import (
    Close,
    Decided,
    DrafterStatus,
    Event,
    EventSink,
    Forget,
    Open,
    Opened,
    Rejected,
    StepStats,
    Update,
    cancelled,
    is_terminal,
)
from verifier.errors import InvalidRequestError, OverloadedError
from verifier.scheduling.scheduler import Scheduler
from verifier.scheduling.sequence import OpenSequence, Sequence

_REQUESTED = tuple(each.name for each in dataclasses.fields(OpenSequence))
_ENDS_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)

# Times as much room in the queue for what goes on as for what is new: a client has read the
# beginning, and a refusal would end it.
_ROOM_TO_GO_ON = 2


class SequenceTable:
    """Owned by the engine thread.

    Invariant: the table and the scheduler hold the same sequences, and each one's session is
    attached.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        max_num_waiting: int,
        max_waiting_tokens: int,
        drafters: Drafters,
        max_short_tokens: int | None = None,
    ) -> None:
        """Args: max_short_tokens: as in `EngineOptions`."""
        self._scheduler = scheduler
        self._drafters = drafters
        drafters.state_changed = self._report_drafter
        self._max_model_len = max_model_len
        self._max_num_waiting = max_num_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_short_tokens = max_short_tokens
        self._sinks: dict[int, EventSink] = {}
        # By session and sequence id: a session can address its own sequences only.
        self._sequences: dict[tuple[int, str], Sequence] = {}
        self._outbox: dict[int, list[Event]] = collections.defaultdict(list)
        self._useless_hints = UselessHintsPrior()

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    def is_full(self, opened: OpenSequence) -> bool:
        """Whether the queue has no room for a further sequence, by number or by tokens. However
        full, it has room for tenants with less than their share of it.
        """
        num_waiting = self._scheduler.num_waiting
        num_tokens = self._scheduler.num_waiting_tokens + opened.num_held_tokens
        room = _ROOM_TO_GO_ON if opened.goes_on else 1
        has_room = num_waiting < room * self._max_num_waiting and (
            num_waiting == 0 or num_tokens <= room * self._max_waiting_tokens
        )
        return not has_room and not self._scheduler.is_within_share(
            opened,
            max_sequences=room * self._max_num_waiting,
            max_tokens=room * self._max_waiting_tokens,
        )

    def attach(self, session_id: int, sink: EventSink) -> None:
        self._sinks[session_id] = sink
        for drafter in self._drafters.in_use:
            self._emit_status(session_id, drafter)

    def detach(self, session_id: int) -> None:
        """Ends all sequences of a session; its sink is not called again."""
        self._sinks.pop(session_id, None)
        self._outbox.pop(session_id, None)
        for sequence in [s for key, s in self._sequences.items() if key[0] == session_id]:
            self._forget(sequence)
        self._drafters.detach(session_id)

    def find(self, session_id: int, sequence_id: str) -> Sequence | None:
        return self._sequences.get((session_id, sequence_id))

    def open(self, command: Open) -> None:
        if command.session_id not in self._sinks:
            return
        opened = command.sequence
        try:
            self._check_open(command)
        except RequestError as error:
            self.refuse(command, error)
            return
        requested = {name: getattr(opened, name) for name in _REQUESTED}
        max_length, max_short = self._max_length(opened), self._max_short_tokens
        sequence = Sequence(
            **(requested | {"token_ids": list(opened.token_ids)}),
            session_id=command.session_id,
            max_length=max_length,
            # By its limit, so that no token's embedding changes while it grows.
            uses_long_rope=max_short is not None and max_length > max_short,
            rows_to_score=opened.requested_rows,
            hint_log=HintLog() if opened.trace else None,
            hint_record=self._useless_hints.begin(),
        )
        if opened.drafted_by is not None:
            self._drafters.move(sequence, opened.drafted_by)
        self._scheduler.add(sequence)
        self._sequences[command.session_id, opened.sequence_id] = sequence

    def refuse(self, command: Open, error: RequestError) -> None:
        """Rejects an Open that starts no sequence."""
        if command.session_id in self._sinks:
            self._outbox[command.session_id].append(
                Rejected(sequence_id=command.sequence.sequence_id, error=error)
            )

    def update(self, command: Update) -> None:
        sequence = self.find(command.session_id, command.sequence_id)
        if sequence is None:
            return
        sequence.drafting = command.drafting
        address, drafted_by = command.drafter_address, sequence.drafted_by
        if drafted_by is None or address is None:
            return
        # A drafter that it had may have been let go: named again, it is asked again.
        is_lost = sequence.drafter is None and address not in ("", sequence.refused_by)
        if address != drafted_by.address or is_lost:
            sequence.drafted_by = dataclasses.replace(drafted_by, address=address)
            self._drafters.move(sequence, sequence.drafted_by)

    def close(self, command: Close) -> None:
        sequence = self.find(command.session_id, command.sequence_id)
        if sequence is None:
            self._drafters.close_ended(
                command.session_id, command.sequence_id, command.keep, command.keep_length
            )
            return
        self._drafters.close(sequence, command.keep, command.keep_length)
        self.emit(sequence, cancelled(sequence.sequence_id, len(sequence.token_ids)))

    def forget(self, command: Forget) -> None:
        """Ends a sequence and drops its queued events."""
        if sequence := self.find(command.session_id, command.sequence_id):
            self._outbox[command.session_id] = [
                event
                for event in self._outbox[command.session_id]
                if event.sequence_id != command.sequence_id
            ]
            self._forget(sequence)

    def admit(self) -> None:
        """Lets waiting sequences run while there is room."""
        for sequence in self._scheduler.admit():
            num_cached = sequence.num_cached_tokens
            self.emit(
                sequence, Opened(sequence_id=sequence.sequence_id, num_cached_tokens=num_cached)
            )

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Queues an event of a sequence; a terminal one ends it."""
        self._outbox[sequence.session_id].append(event)
        if is_terminal(event):
            is_kept = isinstance(event, Decided) and event.finish_reason in _ENDS_BY_ITSELF
            self._forget(sequence, by_itself=is_kept)

    def reject(self, sequence: Sequence, error: RequestError) -> None:
        """Ends a sequence with an error."""
        self.emit(sequence, Rejected(sequence_id=sequence.sequence_id, error=error))

    def flush(self, step: StepStats | None) -> dict[int, Exception]:
        """Hands each session its events. A session whose sink raises gets no more, and is to be
        ended between two steps.

        Returns:
            The exceptions that sinks raised, by session.
        """
        failed: dict[int, Exception] = {}
        for session_id, events in self._outbox.items():
            try:
                self._sinks[session_id](events, step)
            except Exception as error:
                failed[session_id] = error
        self._outbox.clear()
        for session_id in failed:
            self._sinks[session_id] = _discard
        return failed

    def check_integrity(self) -> None:
        """Asserts the invariants."""
        known = {id(sequence) for sequence in self._sequences.values()}
        held = {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}
        assert known == held, "a sequence is known but not scheduled, or the other way round"
        assert all(session_id in self._sinks for session_id, _ in self._sequences)
        self._scheduler.check_integrity()
        self._drafters.check_integrity()

    def _check_open(self, command: Open) -> None:
        if self.find(command.session_id, command.sequence.sequence_id) is not None:
            raise InvalidRequestError("the sequence is open already", field="sequence_id")
        if not self._scheduler.fits(max_length := self._max_length(command.sequence)):
            raise InvalidRequestError(
                f"{max_length} tokens, prompt and output, are more than the K/V cache holds",
                field="max_new_tokens",
            )
        if self.is_full(command.sequence):
            raise OverloadedError(
                f"{self._scheduler.num_waiting} sequences with "
                f"{self._scheduler.num_waiting_tokens} tokens are waiting already",
                retry_after_ms=1000,
            )

    def _max_length(self, opened: OpenSequence) -> int:
        return min(opened.prompt_length + opened.max_new_tokens, self._max_model_len)

    def _report_drafter(self, drafter: FedDrafter) -> None:
        for session_id in self._sinks:
            self._emit_status(session_id, drafter)

    def _emit_status(self, session_id: int, drafter: FedDrafter) -> None:
        if drafter.state is not DrafterState.CONNECTING:
            status = DrafterStatus(
                address=drafter.address, state=drafter.state, reason=drafter.reason
            )
            self._outbox[session_id].append(status)

    def _forget(self, sequence: Sequence, *, by_itself: bool = False) -> None:
        self._useless_hints.learn(sequence.hint_record)
        self._drafters.end(sequence, by_itself=by_itself)
        if sequence.grammar is not None:
            sequence.grammar.forget_fault()
        # Its text may wait for a drafter; what it was sampled with, some MiB, need not.
        sequence.grammar = sequence.adjustments = None
        self._scheduler.finish(sequence)
        del self._sequences[sequence.session_id, sequence.sequence_id]


def _discard(events: list[Event], step: StepStats | None) -> None:
    """The sink of a session that is to be ended."""
