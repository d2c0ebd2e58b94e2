"""One gateway's session: commands from its stream to the engine, events from the engine to it.

Runs on the event loop. The engine thread only calls `_sink`, which passes events to the loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from servicekit.errors import MessageLimitError, RequestError
from servicekit.logs import get_logger
from tandem.v1 import verifier_pb2
from verifier.drafts.draft_buffer import Hint
from verifier.engine.engine import Engine
from verifier.engine.messages import (
    Close,
    DetachSession,
    Event,
    Forget,
    Hints,
    Open,
    Rejected,
    StepStats,
)
from verifier.errors import (
    DrainingError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    SessionError,
)
from verifier.scheduling.sequence import OpenSequence
from verifier.service import command_wire, event_wire
from verifier.service.command_flow import COMMAND_COST, SLICE_COST, CommandFlow
from verifier.service.named_drafters import NamedDrafters
from verifier.service.sequence_spans import SequenceSpans
from verifier.service.served_model import ServedModel
from verifier.service.uncompiled_opens import UncompiledOpens
from verifier.structured.grammars import Grammars

logger = get_logger(__name__)

# Handled between two returns to the event loop; a few milliseconds.
_COMMANDS_PER_SLICE = 4096


class Session:
    """Owned by the event loop. `close` must be called; it frees everything opened here.

    Two queues are bounded. Events that the stream has not sent: beyond `max_event_bytes` the
    session ends with RESOURCE_EXHAUSTED, since a gateway that does not read would otherwise stall
    the engine or fill the memory. Commands that the engine has not handled: beyond the bound the
    stream is not read until it has (`command_flow.py`).
    """

    def __init__(
        self,
        engine: Engine,
        served: ServedModel,
        grammars: Grammars | None,
        *,
        admits_drafter: Callable[[str], bool],
        may_wait: Callable[[int], bool],
        max_event_bytes: int,
        spans: SequenceSpans | None,
    ) -> None:
        """Begins before Hello.

        Args:
            may_wait: whether a sequence of so many tokens may wait for its grammar.
        """
        self._spans = spans
        self._engine = engine
        self._served = served
        # Opens that wait for their grammar.
        self.uncompiled = UncompiledOpens(
            grammars,
            may_wait=may_wait,
            submit=self._submit_open,
            report=lambda event: self._deliver([event], None),
        )
        self._drafters = NamedDrafters(admits_drafter)
        self._max_event_bytes = max_event_bytes
        self._loop = asyncio.get_running_loop()
        # Bounded by the bytes in it, in `_put`; None ends the stream.
        self._responses: asyncio.Queue[verifier_pb2.SessionResponse | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._error: Exception | None = None
        # Sequences with an event that could not be written: their other events are dropped.
        self._forgotten: set[str] = set()
        self._flow = CommandFlow(engine)
        self._is_draining = False
        # 0 until Hello, so that Welcome is the first event.
        self._session_id = 0

    async def read(self, requests: AsyncIterator[verifier_pb2.SessionRequest]) -> None:
        """Submits commands until the stream ends, then ends the session."""
        try:
            greeted = False
            async for request in requests:
                if self._error is not None:
                    # `responses` may be long in raising it: its client may not read.
                    return
                received_at_s = time.monotonic()
                command_wire.SESSION_LIMITS.check_counts(request)
                commands: Sequence[verifier_pb2.Command] = request.commands
                if not greeted:
                    self._check_hello(commands[0] if commands else None)
                    greeted = True
                    commands = commands[1:]
                await self._submit(commands, received_at_s)
        except Exception as error:
            self._fail(error)
        finally:
            self._responses.put_nowait(None)

    async def responses(self) -> AsyncIterator[verifier_pb2.SessionResponse]:
        """The stream's messages: Welcome, then one per engine step.

        Raises:
            RequestError: the client violated the protocol or left too many events unread.
            Exception: any other failure of `read`.
        """
        while (response := await self._responses.get()) is not None:
            self._queued_bytes -= response.ByteSize()
            yield response
            if self._error is not None:
                break
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Refuses Opens from now on, and says so."""
        self._is_draining = True
        if self._session_id and self._error is None:
            self._put(event_wire.draining())

    def end(self) -> None:
        """Ends the stream once the queued messages have been sent."""
        self._responses.put_nowait(None)

    def close(self) -> None:
        self.uncompiled.cancel()
        if self._spans is not None:
            self._spans.end_all()
        if self._session_id:
            self._engine.submit(DetachSession(session_id=self._session_id))

    def _sink(self, events: list[Event], step: StepStats | None) -> None:
        """Called by the engine thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._deliver, events, step)

    def _deliver(self, events: list[Event], step: StepStats | None) -> None:
        if self._error is not None:
            return
        if self._forgotten:
            events = [event for event in events if event.sequence_id not in self._forgotten]
        try:
            response = event_wire.response(events, step)
        except Exception:
            events = [self._written(event) for event in events]
            response = event_wire.response(events, step)
        if self._spans is not None:
            self._spans.note(events)
        self._put(*event_wire.split(response))

    def _written(self, event: Event) -> Event:
        """The event, or, if it cannot be written, a Rejected that ends its sequence."""
        try:
            event_wire.response([event], None)
        except Exception as error:
            self._forgotten.add(event.sequence_id)
            self._engine.submit(
                Forget(session_id=self._session_id, sequence_id=event.sequence_id, error=error)
            )
            return Rejected(sequence_id=event.sequence_id, error=InternalError())
        return event

    def _put(self, *responses: verifier_pb2.SessionResponse) -> None:
        """Queues the parts of one answer, or ends the session if too much before it is unread: a
        step's events may be more than that.
        """
        if self._queued_bytes > self._max_event_bytes:
            self._fail(
                OverloadedError(
                    f"over {self._max_event_bytes} bytes of events are unread", retry_after_ms=1000
                )
            )
            return
        for response in responses:
            self._queued_bytes += response.ByteSize()
            self._responses.put_nowait(response)

    def _fail(self, error: Exception) -> None:
        """Ends the session; `responses` raises the error."""
        self._error = error
        self.close()
        # Its client may never read on: nothing is kept for it.
        while not self._responses.empty():
            self._responses.get_nowait()
        self._responses.put_nowait(None)

    def _check_hello(self, command: verifier_pb2.Command | None) -> None:
        if command is None or command.WhichOneof("command") != "hello":
            raise SessionError("the first command must be Hello", field="commands[0].hello")
        command_wire.COMMAND_LIMITS.check_within(command, "commands", 0)
        version = command.hello.protocol_version
        if version != event_wire.PROTOCOL_VERSION:
            raise SessionError(
                f"version {version} is not {event_wire.PROTOCOL_VERSION}",
                field="commands[0].hello.protocol_version",
            )
        self._put(event_wire.welcome(self._served))
        if self._is_draining:
            self._put(event_wire.draining())
        self._session_id = self._engine.attach(self._sink)

    async def _submit(self, commands: Sequence[verifier_pb2.Command], received_at_s: float) -> None:
        """Submits a message's commands, drafts first, in slices if they are many."""
        hints: list[Hint] = []
        others: list[verifier_pb2.Command] = []
        rejected: list[Event] = []
        cost = 0
        for index, command in enumerate(commands):
            if index % _COMMANDS_PER_SLICE == 0 and len(commands) > _COMMANDS_PER_SLICE:
                # Also at index 0: parsing so large a message took long enough.
                await asyncio.sleep(0)
            if self._error is not None:
                return
            if not command.HasField("draft"):
                others.append(command)
                continue
            try:
                hints.append(command_wire.hint(command.draft, self._served))
            except MessageLimitError as error:
                rejected.append(command_wire.rejected_command(command, error))
            except Exception:
                logger.exception("command_failed", sequence_id=command.draft.sequence_id)
            cost += COMMAND_COST + len(command.draft.token_ids)
            if cost >= SLICE_COST:
                self._submit_hints(hints, rejected, received_at_s)
                await self._flow.submitted(cost)
                hints, rejected, cost = [], [], 0
        if cost:
            self._submit_hints(hints, rejected, received_at_s)
            await self._flow.submitted(cost)
        if others:
            await self._submit_others(others)

    def _submit_hints(self, hints: list[Hint], rejected: list[Event], received_at_s: float) -> None:
        if hints:
            self._engine.submit(
                Hints(session_id=self._session_id, hints=hints, received_at_s=received_at_s)
            )
        if rejected:
            self._deliver(rejected, None)

    async def _submit_others(self, commands: list[verifier_pb2.Command]) -> None:
        rejected: list[Event] = []
        cost = 0
        for command in commands:
            if self._error is not None:
                return
            cost += COMMAND_COST + len(command.open.token_ids)
            try:
                self._submit_one(command)
            except Exception as error:
                rejected.append(self._rejected(command, error))
            if cost >= SLICE_COST:
                if rejected:
                    self._deliver(rejected, None)
                    rejected = []
                await self._flow.submitted(cost)
                cost = 0
        if rejected:
            self._deliver(rejected, None)
        await self._flow.submitted(cost)

    def _rejected(self, command: verifier_pb2.Command, error: Exception) -> Rejected:
        if isinstance(error, MessageLimitError):
            return command_wire.rejected_command(command, error)
        sequence_id = command.open.sequence_id if command.HasField("open") else ""
        if not isinstance(error, RequestError):
            logger.error("command_failed", sequence_id=sequence_id, exc_info=error)
            error = InternalError()
        return Rejected(sequence_id=sequence_id, error=error)

    def _submit_one(self, command: verifier_pb2.Command) -> None:
        session_id = self._session_id
        match command.WhichOneof("command"):
            case "open":
                if self._spans is not None:
                    self._spans.receive(command.open.sequence_id)
                command_wire.COMMAND_LIMITS.check(command)
                if command.open.sequence_id in self.uncompiled:
                    raise InvalidRequestError("is open already", field="sequence_id")
                if self._is_draining:
                    raise DrainingError("the verifier is shutting down", retry_after_ms=1000)
                sequence = command_wire.open_sequence(
                    command.open, self._served, drafters=self._drafters
                )
                grammar = command_wire.grammar_of(command.open, self._served)
                if self._spans is not None:
                    sequence = self._spans.begin(sequence, command.open.trace_parent)
                if grammar is None:
                    self._submit_open(sequence)
                else:
                    self.uncompiled.add(sequence, grammar)
            case "close":
                command_wire.COMMAND_LIMITS.check(command)
                close = Close(
                    session_id=session_id,
                    sequence_id=command.close.sequence_id,
                    keep=command_wire.keep_of_closed(command.close.keep),
                    keep_length=command.close.keep_length,
                )
                self.uncompiled.close(close.sequence_id)
                # One with this id may be open, so that the engine would have refused the other.
                self._engine.submit(close)
            case "update":
                command_wire.COMMAND_LIMITS.check(command)
                update = command_wire.update(command.update, session_id, drafters=self._drafters)
                if update.sequence_id in self.uncompiled:
                    self.uncompiled.update(update)
                else:
                    self._engine.submit(update)
            case "hello":
                raise InvalidRequestError("Hello comes once, first", field="commands.hello")
            case _:
                raise InvalidRequestError("unknown command", field="commands")

    def _submit_open(self, sequence: OpenSequence) -> None:
        self._engine.submit(Open(session_id=self._session_id, sequence=sequence))
