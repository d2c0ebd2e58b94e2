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
from gateway.messages.verifier import Decided, Hint, OpenCommand, Rejected, VerifierEvent, Welcome
from gateway.metrics import GatewayMetrics
from gateway.peers import wire
from gateway.peers.ignored_messages import IgnoredMessages
from gateway.peers.outbox import Outbox
from gateway.peers.peer_stream import Call, PeerError, PeerStream
from servicekit.logs import Logger
from tandem.v1 import verifier_pb2, verifier_pb2_grpc

# Closed sequences whose last event is awaited: the verifier answers each Close, so there are few.
_MAX_CLOSED = 1 << 16

# Opens in one message, unless one alone is larger: making them must not block the event loop long.
_MAX_OPENS = 256
_MAX_OPENS_BYTES = MAX_SESSION_REQUEST_BYTES // 4

_Call = Call[verifier_pb2.SessionRequest, verifier_pb2.SessionResponse]


class VerifierListener(Protocol):
    """Acts on what a verifier sends."""

    def on_verifier_up(self, verifier: "VerifierLink") -> None: ...

    def on_step(
        self, verifier: "VerifierLink", events: Sequence[VerifierEvent], received_s: float
    ) -> None: ...

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
        num_sequences: how many are open there.
        last_progress_s: when it last sent a message, was seen to step, or got its first sequence.
    """

    def __init__(
        self,
        *,
        name: str,
        channel: grpc.aio.Channel,
        gateway_id: str,
        listener: VerifierListener,
        hint_tokens: int,
        greet_timeout_s: float,
        metrics: GatewayMetrics,
        logger: Logger,
    ) -> None:
        """Prepares; `run` connects."""
        self.name = name
        self.ignored = IgnoredMessages(
            peer="verifier", address=name, metrics=metrics, logger=logger
        )
        self.welcome: Welcome | None = None
        self.num_sequences = 0
        self.last_progress_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._gateway_id = gateway_id
        self._listener = listener
        self._outbox = Outbox(hint_tokens=hint_tokens)
        # The Open that did not fit into the last message, encoded for the next.
        self._encoded_open: tuple[OpenCommand, verifier_pb2.Open] | None = None
        # Closed sequences whose last event is still to come, oldest first.
        self._closed: dict[str, None] = {}
        self._stub = stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        # As last reported by the verifier.
        self._num_steps: int | None = None
        self._stream = PeerStream(
            open_call=lambda: stub.Session(wait_for_ready=True),
            handler=self,
            greet_timeout_s=greet_timeout_s,
            on_internal_error=lambda error: self.ignored.record("internal_error", repr(error)),
            logger=logger.bind(verifier=name),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is open there and no command is left to send."""
        return self.num_sequences == 0 and self._outbox.is_empty

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    def open(self, command: OpenCommand) -> None:
        if self.num_sequences <= 1:
            self.last_progress_s = self._loop.time()
        self._outbox.open(command)
        self._stream.wake()

    def hint(self, hints: Sequence[Hint]) -> None:
        """Sends a step's hints, in one message unless the stream is blocked; hot path."""
        for hint in hints:
            self._outbox.hint(hint)
        self._stream.wake()

    def update(self, sequence_id: str, *, drafting: bool) -> None:
        self._outbox.update(sequence_id, drafting)
        self._stream.wake()

    def close(self, sequence_id: str) -> None:
        if self._outbox.close(sequence_id):
            self._closed[sequence_id] = None
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
        """The verifier ended the sequence itself: drops its unsent commands."""
        self._outbox.forget(sequence_id)

    async def has_stepped(self, *, timeout_s: float) -> bool:
        """Whether its engine has made steps, for any sequence, since the last call; true for the
        first call.
        """
        try:
            load = await self._stub.GetVerifierLoad(
                verifier_pb2.GetVerifierLoadRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError:
            return False
        has_stepped = load.num_steps != self._num_steps
        self._num_steps = load.num_steps
        if has_stepped:
            self.last_progress_s = self._loop.time()
        return has_stepped

    def give_up(self, reason: str) -> None:
        """Ends the session, and every sequence with it."""
        self._stream.fail(PeerError(reason))

    async def greet(self, call: _Call) -> None:
        """PeerHandler: Hello and Welcome."""
        await call.write(wire.hello_to_proto(self._gateway_id))
        answer = await call.read()
        welcome = (
            wire.welcome_from_proto(answer)
            if isinstance(answer, verifier_pb2.SessionResponse)
            else None
        )
        if welcome is None:
            raise PeerError(f"no Welcome of protocol version {wire.PROTOCOL_VERSION}")
        self.welcome = welcome

    def on_up(self) -> None:
        """PeerHandler."""
        self._listener.on_verifier_up(self)

    def next_request(self) -> verifier_pb2.SessionRequest | None:
        """PeerHandler."""
        batch = self._outbox.next_batch()
        request = None if batch is None else wire.commands_to_proto(batch)
        return request if self._outbox.next_open is None else self._add_opens(request)

    def on_response(self, response: verifier_pb2.SessionResponse) -> None:
        """PeerHandler."""
        received_s = self.last_progress_s = self._loop.time()
        self._listener.on_step(self, wire.events_from_proto(response), received_s)

    def _add_opens(
        self, request: verifier_pb2.SessionRequest | None
    ) -> verifier_pb2.SessionRequest | None:
        """Adds as many Opens as the message may hold; at least one if it holds nothing else."""
        # Hints, updates and closes leave `_MAX_OPENS_BYTES` at least.
        num_bytes = 0
        num_opens = 0
        while num_opens < _MAX_OPENS and (command := self._outbox.next_open) is not None:
            if self._encoded_open is None or self._encoded_open[0] is not command:
                self._encoded_open = command, wire.open_to_proto(command)
            message = self._encoded_open[1]
            open_bytes = message.ByteSize()
            if open_bytes > MAX_OPEN_BYTES:
                self._outbox.remove_open(command)
                self._listener.on_unsendable(
                    self, command.sequence_id, _too_large(message, open_bytes)
                )
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

    def on_down(self) -> None:
        """PeerHandler."""
        self.welcome = None
        self._encoded_open = None
        self._outbox.clear()
        self._closed.clear()
        self._listener.on_verifier_down(self)


def _too_large(message: verifier_pb2.Open, num_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request takes a message of {num_bytes} bytes to the verifier, over the limit of "
        f"{MAX_OPEN_BYTES}",
        field=client_field(wire.largest_field(message)),
    )
