"""The one Session stream to one verifier.

Owns the stream and the commands that wait for it. Does not know what events mean: its listener,
the coordinator, does.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc

from gateway.errors import InvalidRequestError, client_field
from gateway.messages.sizes import FIELD_BYTES, MAX_OPEN_BYTES, MAX_SESSION_REQUEST_BYTES
from gateway.messages.verifier import (
    CloseCommand,
    Decided,
    OpenCommand,
    Rejected,
    VerifierEvent,
    Welcome,
)
from gateway.metrics import GatewayMetrics
from gateway.peers import wire
from gateway.peers.ignored_messages import IgnoredMessages
from gateway.peers.outbox import Outbox
from gateway.peers.verifier_load import VerifierLoad
from servicekit.channels.peer_stream import Call, PeerError, PeerStream
from servicekit.logs import Logger
from tandem.declared import FieldError
from tandem.v1 import verifier_pb2, verifier_pb2_grpc

# Closed sequences whose last event is awaited: the verifier answers each Close, so there are few.
_MAX_CLOSED = 1 << 16

# A longer round trip to a drafter is a mistake of the verifier: nothing waits for so long.
_MAX_ROUND_TRIP_S = 60.0

# Opens in one message, unless one alone is larger: making them must not block the event loop long.
_MAX_OPENS = 256
_MAX_OPENS_BYTES = MAX_SESSION_REQUEST_BYTES // 4

# In one message of a verifier, which splits larger answers long before. Millions of empty ones fit.
_MAX_EVENTS = 1 << 14

# No request can name a longer one (gateway.proto), and each series of its metrics would hold it.
_MAX_NAME_BYTES = 256

_Call = Call[verifier_pb2.SessionRequest, verifier_pb2.SessionResponse]


class VerifierListener(Protocol):
    """Acts on what a verifier sends."""

    def on_verifier_up(self, verifier: "VerifierLink") -> None: ...

    def on_step(self, verifier: "VerifierLink", events: Sequence[VerifierEvent]) -> None: ...

    def on_unsendable(
        self, verifier: "VerifierLink", sequence_id: str, error: InvalidRequestError
    ) -> None: ...

    def on_verifier_down(self, verifier: "VerifierLink") -> None: ...


class VerifierLink:
    """One verifier as the coordinator sees it: commands go in and return at once.

    Attributes:
        name: the verifier's address, by which it is routed.
        ignored: reports its invalid messages.
        welcome: who it is; None while it is not connected.
        is_leaving: whether it gets no new sequences, because discovery finds it no more.
        num_sequences: how many are open there.
        load: what else it has to do, and whether it does it.
        is_draining: whether it takes no more sequences.
    """

    def __init__(
        self,
        *,
        name: str,
        channel: grpc.aio.Channel,
        gateway_id: str,
        listener: VerifierListener,
        greet_timeout_s: float,
        metrics: GatewayMetrics,
        logger: Logger,
    ) -> None:
        """Prepares; `run` connects."""
        self.name = name
        self.ignored = IgnoredMessages(verifier=name, metrics=metrics, logger=logger)
        self.welcome: Welcome | None = None
        self.is_leaving = False
        self.num_sequences = 0
        self.load = VerifierLoad()
        self.is_draining = False
        self._loop = asyncio.get_running_loop()
        self._gateway_id = gateway_id
        self._listener = listener
        self._metrics = metrics
        self._outbox = Outbox()
        # The Open that did not fit into the last message, encoded for the next.
        self._encoded_open: tuple[OpenCommand, verifier_pb2.Open] | None = None
        # Closed sequences whose last event is still to come, oldest first.
        self._closed: dict[str, None] = {}
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        # The events that came with the Welcome.
        self._first_events: Sequence[VerifierEvent] = ()
        self._stream = PeerStream(
            channel=channel,
            open_call=self._stub.Session,
            handler=self,
            greet_timeout_s=greet_timeout_s,
            on_internal_error=lambda error: self.ignored.record("internal_error", repr(error)),
            logger=logger.bind(verifier=name),
        )

    @property
    def numerics_digest(self) -> str:
        """Of the connected verifier; "" if it promises nothing."""
        return "" if self.welcome is None else self.welcome.numerics_digest

    @property
    def is_available(self) -> bool:
        """Whether new sequences can be opened there."""
        return self.welcome is not None and not (self.is_leaving or self.is_draining)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is open there and no command is left to send."""
        return self.num_sequences == 0 and self._outbox.is_empty

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    def open(self, command: OpenCommand) -> None:
        if self.num_sequences <= 1:
            self.load.begin(self._loop.time())
        self.load.prompts[command.sequence_id] = len(command.token_ids)
        self._outbox.open(command)
        self._stream.wake()

    def update(self, sequence_id: str, *, drafter: str) -> bool:
        """Moves the sequence to this drafter. Returns whether its Open itself will name it."""
        is_unsent = self._outbox.update(sequence_id, drafter)
        self._stream.wake()
        return is_unsent

    def close(self, command: CloseCommand, *, has_ended: bool) -> None:
        """Ends a sequence, or says what is kept of one whose last event has come already."""
        if self.welcome is None:
            return
        self.load.prompts.pop(command.sequence_id, None)
        if self._outbox.close(command) and not has_ended:
            self._closed[command.sequence_id] = None
            if len(self._closed) > _MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
        self._stream.wake()

    def is_late(self, event: VerifierEvent) -> bool:
        """Whether the event was on its way when its sequence was closed."""
        if event.sequence_id not in self._closed:
            return False
        if isinstance(event, Rejected) or (isinstance(event, Decided) and event.finish_reason):
            del self._closed[event.sequence_id]
        return True

    def forget(self, sequence_id: str) -> None:
        """The sequence is over: drops its unsent update."""
        self._outbox.forget(sequence_id)

    async def poll(self, *, timeout_s: float) -> None:
        """Asks for its load; `load` tells whether it has answered."""
        try:
            load = await self._stub.GetVerifierLoad(
                verifier_pb2.GetVerifierLoadRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError:
            return
        self.load.answer(self._loop.time())
        self.load.report(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_own=self.num_sequences,
            num_steps=load.num_steps,
            step_s=load.step_duration_s,
        )

    def give_up(self, reason: str) -> None:
        """Ends the session, and every sequence with it."""
        self._stream.fail(PeerError(reason))

    async def greet(self, call: _Call) -> None:
        """PeerHandler: Hello and Welcome, which other events may follow."""
        await call.write(wire.hello_to_proto(self._gateway_id))
        answer = await call.read()
        welcome = None
        if isinstance(answer, verifier_pb2.SessionResponse):
            _check_size(answer)
            welcome = wire.welcome_from_proto(answer)
        if welcome is None:
            raise PeerError(f"no Welcome of protocol version {wire.PROTOCOL_VERSION}")
        _check_names(welcome[0])
        self.welcome, self._first_events = welcome

    def on_up(self) -> None:
        """PeerHandler."""
        assert self.welcome is not None, "greeted"
        self.load.connect(self._loop.time(), self.welcome.instance_id, self.welcome.max_step_tokens)
        self._listener.on_verifier_up(self)
        self._listener.on_step(self, self._first_events)
        self._first_events = ()

    def next_request(self) -> verifier_pb2.SessionRequest | None:
        """PeerHandler."""
        batch = self._outbox.next_batch()
        request = None if batch is None else wire.commands_to_proto(batch)
        return request if self._outbox.next_open is None else self._add_opens(request)

    def on_response(self, response: verifier_pb2.SessionResponse) -> None:
        """PeerHandler.

        Raises:
            PeerError: there are too many events.
        """
        _check_size(response)
        events = wire.events_from_proto(response.events)
        if self.load.prompts:
            for event in events:
                if isinstance(event, Decided | Rejected):
                    self.load.prompts.pop(event.sequence_id, None)
        if response.HasField("step"):
            # Before choices may move there.
            self.load.num_waiting = response.step.num_waiting
            self.load.num_kv_blocks_used = response.step.num_kv_blocks_used
        self._listener.on_step(self, events)
        self.load.answer(self._loop.time())
        if not response.HasField("step"):
            return
        step = response.step
        self.load.step(
            step_id=step.step_id,
            num_tokens=step.num_scheduled_tokens,
            num_sequences=step.num_running + step.num_waiting,
            num_own=self.num_sequences,
            step_s=step.duration_s,
        )
        round_trip_s = step.draft_round_trip_s
        if 0 < round_trip_s <= _MAX_ROUND_TRIP_S:
            self._metrics.observe_draft_round_trip(round_trip_s)

    def _add_opens(
        self, request: verifier_pb2.SessionRequest | None
    ) -> verifier_pb2.SessionRequest | None:
        """Adds as many Opens as the message may hold; at least one if it holds nothing else."""
        # Updates and closes leave `_MAX_OPENS_BYTES` at least.
        num_bytes = 0
        num_opens = 0
        while num_opens < _MAX_OPENS and (command := self._outbox.next_open) is not None:
            if self._encoded_open is None or self._encoded_open[0] is not command:
                try:
                    self._encoded_open = command, wire.open_to_proto(command)
                except FieldError as error:
                    self._refuse(command, InvalidRequestError(error.reason, field=error.field))
                    continue
            message = self._encoded_open[1]
            open_bytes = message.ByteSize()
            if open_bytes > MAX_OPEN_BYTES:
                self._refuse(command, _too_large(message, open_bytes))
                continue
            num_bytes += open_bytes + 2 * FIELD_BYTES
            if request is None:
                request = verifier_pb2.SessionRequest()
            elif num_bytes > _MAX_OPENS_BYTES:
                break
            request.commands.add().open.CopyFrom(message)
            self._outbox.remove_open(command)
            num_opens += 1
        if self._outbox.next_open is None:
            self._encoded_open = None
        return request

    def _refuse(self, command: OpenCommand, error: InvalidRequestError) -> None:
        """The Open cannot be sent: its sequence ends, and no other."""
        self._outbox.remove_open(command)
        del self.load.prompts[command.sequence_id]
        self._listener.on_unsendable(self, command.sequence_id, error)

    def on_unreachable(self, reason: str) -> None:
        """PeerHandler."""

    def on_down(self, reason: str) -> None:
        """PeerHandler."""
        self.welcome = None
        self._encoded_open = None
        self._outbox.clear()
        self._closed.clear()
        self.load.prompts.clear()
        self._listener.on_verifier_down(self)
        self.is_draining = False


def _check_names(welcome: Welcome) -> None:
    for field, name in (("model_id", welcome.model_id), ("model_digest", welcome.model_digest)):
        if (num_bytes := len(name.encode())) > _MAX_NAME_BYTES:
            raise PeerError(f"{num_bytes} bytes of {field} are over the limit of {_MAX_NAME_BYTES}")


def _check_size(response: verifier_pb2.SessionResponse) -> None:
    if len(response.events) > _MAX_EVENTS:
        raise PeerError(f"{len(response.events)} events in one message")


def _too_large(message: verifier_pb2.Open, num_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request takes a message of {num_bytes} bytes to the verifier, over the limit of "
        f"{MAX_OPEN_BYTES}",
        field=client_field(wire.largest_field(message)),
    )
