"""The one ProposeStream to one drafter.

Owns the stream, its feed and the drafter's deadlines. A drafter that answers late is worse than
none, because a step may wait for it: it counts as slow, and no step waits for it, until it has
caught up. It keeps its stream and its histories: a replay would make it slower still. Only one
that does not answer for far longer is gone.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc

from gateway.generation.generation import Generation
from gateway.messages.request import Keep
from gateway.messages.verifier import Hint
from gateway.metrics import GatewayMetrics
from gateway.peers import wire
from gateway.peers.draft_feed import DrafterProtocolError, DraftFeed
from gateway.peers.ignored_messages import IgnoredMessages
from gateway.peers.peer_stream import Call, PeerError, PeerStream
from servicekit.logs import Logger
from tandem.v1 import drafter_pb2, drafter_pb2_grpc

_Call = Call[drafter_pb2.ProposeRequest, drafter_pb2.ProposeResponse]

# How many deadlines late an answer must be for the drafter to count as gone.
_GONE_AFTER_DEADLINES = 40

# The batch id of greetings; those of the feed begin at 1.
_GREETING_ID = 0


class DrafterListener(Protocol):
    """Acts on what a drafter sends."""

    def on_drafter_up(self, drafter: "DrafterLink") -> None: ...

    def on_hints(self, drafter: "DrafterLink", hints: Sequence[Hint]) -> None: ...

    def on_given_up(self, drafter: "DrafterLink", sequence_id: str) -> None: ...

    def on_drafter_slow(self, drafter: "DrafterLink") -> None: ...

    def on_drafter_down(self, drafter: "DrafterLink") -> None: ...


class DrafterLink:
    """One drafter as the coordinator sees it: calls return at once, hints come later.

    Attributes:
        name: the drafter's address, by which it is routed.
        ignored: reports its invalid messages.
        is_up: whether it is connected.
        is_slow: whether its answers are late, so that no step may wait for its hints.
    """

    def __init__(
        self,
        *,
        name: str,
        channel: grpc.aio.Channel,
        listener: DrafterListener,
        hint_tokens: int,
        deadline_s: float,
        greet_timeout_s: float,
        metrics: GatewayMetrics,
        logger: Logger,
    ) -> None:
        """Prepares; `run` connects.

        Args:
            deadline_s: how late an answer may be before the drafter counts as slow.
        """
        self.name = name
        self.ignored = IgnoredMessages(peer="drafter", address=name, metrics=metrics, logger=logger)
        self.is_up = False
        self.is_slow = False
        self._listener = listener
        self._feed = DraftFeed(hint_tokens=hint_tokens)
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._logger = logger.bind(drafter=name)
        self._loop = asyncio.get_running_loop()
        self._deadline_timer: asyncio.TimerHandle | None = None
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        self._stream = PeerStream(
            open_call=lambda: stub.ProposeStream(wait_for_ready=True),
            handler=self,
            greet_timeout_s=greet_timeout_s,
            on_internal_error=lambda error: self.ignored.record("internal_error", repr(error)),
            logger=self._logger,
        )

    @property
    def awaits_drafts(self) -> bool:
        """Whether a hint is expected from it."""
        return self.is_up and not self.is_slow and self._feed.awaits_drafts

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is fed and no message is left to send."""
        return self._feed.is_idle

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    def add(self, generation: Generation) -> None:
        """Begins to feed a sequence; its prompt is sent at once."""
        self._feed.add(generation)
        self._stream.wake()

    def advance(self, sequence_id: str, max_draft_tokens: int) -> None:
        """The sequence has new tokens, which the next `flush` sends; hot path."""
        self._feed.advance(sequence_id, max_draft_tokens)

    def flush(self, received_s: float) -> None:
        """Sends the new tokens: one message for all sequences that advanced; hot path.

        Args:
            received_s: when the step arrived.
        """
        self._feed.begin_step(received_s)
        self._stream.wake()

    def remove(self, sequence_id: str, *, keep: Keep = Keep.NOTHING) -> None:
        """The sequence is over: the drafter may forget it, and its pool keeps this part of it."""
        self._feed.remove(sequence_id, keep=keep)
        self._stream.wake()

    async def greet(self, call: _Call) -> None:
        """PeerHandler: an empty batch costs nothing and proves that the drafter answers."""
        await call.write(drafter_pb2.ProposeRequest(batch_id=_GREETING_ID))
        answer = await call.read()
        if not isinstance(answer, drafter_pb2.ProposeResponse) or answer.batch_id != _GREETING_ID:
            raise PeerError("the greeting was not answered")

    def on_up(self) -> None:
        """PeerHandler: the feed sends every history again, whatever the drafter still has."""
        self.is_up = True
        self._listener.on_drafter_up(self)

    def next_request(self) -> drafter_pb2.ProposeRequest | None:
        """PeerHandler."""
        batch = self._feed.next_batch(self._loop.time())
        if batch is None:
            return None
        if self._deadline_timer is None:
            self._deadline_timer = self._loop.call_later(self._deadline_s, self._check_deadline)
        return wire.deltas_to_proto(batch)

    def on_response(self, response: drafter_pb2.ProposeResponse) -> None:
        """PeerHandler: hot path."""
        received_s = self._loop.time()
        try:
            answer = self._feed.on_proposals(response.batch_id, wire.proposals_from_proto(response))
        except DrafterProtocolError as error:
            raise PeerError(f"the answer is invalid: {error}") from error
        oldest_sent_s = self._feed.oldest_sent_s
        self.is_slow = (
            self.is_slow
            and oldest_sent_s is not None
            and received_s >= oldest_sent_s + self._deadline_s
        )
        if answer.hints:
            self._listener.on_hints(self, answer.hints)
        for sequence_id, reason in answer.given_up:
            self.ignored.record("refused_sequence", reason)
            self._listener.on_given_up(self, sequence_id)
        for mistake in answer.invalid:
            self.ignored.record("odd_proposal", mistake)
        # There may be room for another batch, or tokens to send again.
        self._stream.wake()
        if answer.sent_s is not None:
            # The verifiers' writers, woken before, run first.
            self._loop.call_soon(
                self._observe, received_s - answer.sent_s, answer.step_s, bool(answer.hints)
            )

    def on_down(self) -> None:
        """PeerHandler."""
        self.is_up = self.is_slow = False
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._feed.restart()
        self._listener.on_drafter_down(self)

    def _observe(self, round_trip_s: float, step_s: float | None, has_hints: bool) -> None:
        self._metrics.observe_draft_round_trip(round_trip_s)
        if has_hints and step_s is not None:
            self._metrics.observe_draft_relay(self._loop.time() - step_s)

    def _check_deadline(self) -> None:
        # One timer for all batches: it is set for the oldest one.
        self._deadline_timer = None
        sent_s = self._feed.oldest_sent_s
        if sent_s is None:
            return
        gone_s = sent_s + self._deadline_s * _GONE_AFTER_DEADLINES
        due_s = sent_s + self._deadline_s
        now_s = self._loop.time()
        if now_s >= gone_s:
            self._stream.fail(
                PeerError(f"no answer within {self._deadline_s * _GONE_AFTER_DEADLINES:g} s")
            )
            return
        if now_s >= due_s:
            due_s = now_s + self._deadline_s
            if not self.is_slow:
                self.is_slow = True
                self.ignored.record("late_answer")
                self._listener.on_drafter_slow(self)
        self._deadline_timer = self._loop.call_at(due_s, self._check_deadline)
