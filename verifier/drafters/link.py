"""The one ProposeStream to one drafter: moves bytes, and watches the clock.

Runs on the event loop; does not know what the bytes mean. The engine thread sends through `Link`'s
methods, and is told of everything through `post`. A stream answers in the order of its requests,
one answer each, so what is unanswered, and for how long, is known here without reading an answer.

A drafter that is late is a little worse than none, because a step may wait for it. One late answer
changes nothing: it is used nevertheless. A drafter that stays late is put aside: nothing is asked
of it until it has answered everything and a pause is over, which doubles each time. It keeps its
stream and its histories, since a replay would make it slower still. Only one that does not answer
for far longer is gone.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable

import grpc

from servicekit.address import parse_address
from servicekit.channels.channel import open_channel
from servicekit.channels.peer_stream import Call, PeerError, PeerStream
from servicekit.config import ChannelOptions
from servicekit.logs import Logger
from verifier.drafters import wire
from verifier.drafters.addresses import AdmittedDrafters
from verifier.drafters.messages import (
    DrafterAnswered,
    DrafterBack,
    DrafterDown,
    DrafterFault,
    DrafterLate,
    DrafterMessage,
    DrafterUp,
)

# Deadlines in a row without an answer, or with late answers only, until it is put aside.
_LATE_UNTIL_ASIDE = 3
# How many deadlines late an answer must be for the drafter to count as gone.
_GONE_AFTER_DEADLINES = 40
# How long it stays aside, after it has caught up: at first, and at most.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# After so long in time, the pauses begin with the first again.
_FORGIVEN_AFTER_S = 60.0

_GREET_TIMEOUT_S = 5.0
# Pause between attempts to open a channel whose TLS files cannot be used.
_REOPEN_PAUSE_S = 1.0


class DrafterLink:
    """One drafter's stream, kept open until `close`."""

    def __init__(
        self,
        address: str,
        *,
        admitted: AdmittedDrafters,
        loop: asyncio.AbstractEventLoop,
        options: ChannelOptions,
        post: Callable[[DrafterMessage], None],
        deadline_s: float,
        logger: Logger,
    ) -> None:
        """For any thread; `start` connects.

        Args:
            admitted: says when it may connect.
            post: gives the engine a message.
            deadline_s: how late an answer may be before the drafter counts as late.
        """
        self._address = parse_address(address)
        self._admitted = admitted
        self._loop = loop
        self._options = options
        self._post = post
        self._deadline_s = deadline_s
        self._logger = logger.bind(drafter=address)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        # Counts the streams that were up; and whether the last one still is.
        self._epoch = 0
        self._is_up = False
        # Bounded by the batches that a feed has in flight.
        self._unsent: collections.deque[bytes] = collections.deque()
        # Of each request without an answer: when it was to be sent, and the longest answer.
        self._unanswered: collections.deque[tuple[float, int]] = collections.deque()
        # Why the stream is about to end, if the drafter is to blame.
        self._fault: DrafterFault | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_late = 0
        self._is_aside = False
        self._pause_s = _FIRST_PAUSE_S
        self._last_late_s = 0.0

    # Link: for any thread.

    def send(self, epoch: int, data: bytes, max_answer_bytes: int) -> None:
        """Link: sends a message if the stream of this epoch is still up."""
        self._call(self._send, epoch, data, max_answer_bytes)

    def fail(self, epoch: int, reason: str) -> None:
        """Link: ends the stream of this epoch."""
        self._call(self._fail, epoch, reason)

    def close(self) -> None:
        """Link: ends everything."""
        self._call(self._close)

    def start(self) -> None:
        """Begins to connect."""
        self._call(self._start)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(function, *args)

    # On the event loop.

    def _start(self) -> None:
        if not self._is_closed:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        address = self._address
        if not self._admitted.may_connect(address):
            self._report_down("no name among this verifier's --drafters resolves to it")
            await self._admitted.wait(address)
        async with await self._open_channel() as channel:
            # Messages come and go as bytes.
            self._stream: PeerStream[bytes, bytes] = PeerStream(
                channel=channel,
                open_call=channel.stream_stream(wire.METHOD),
                handler=self,
                greet_timeout_s=_GREET_TIMEOUT_S,
                on_internal_error=self._on_internal_error,
                logger=self._logger,
            )
            await self._stream.run()

    async def _open_channel(self) -> grpc.aio.Channel:
        """Tries until it can be opened: its files may just be replaced, or be without a certificate
        for a name below the operator's.
        """
        reported = ""
        while True:
            try:
                return open_channel(
                    str(self._address),
                    self._options,
                    server_name=self._admitted.server_name(self._address),
                    user_agent="tandem-verifier",
                )
            except Exception as error:
                if str(error) != reported:
                    reported = str(error)
                    self._logger.error("drafter_link_failed", error=reported)
                    self._report_down(reported, DrafterFault.INTERNAL_ERROR)
                await asyncio.sleep(_REOPEN_PAUSE_S)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._forget_stream()
        if self._task is not None:
            self._task.cancel()

    def _send(self, epoch: int, data: bytes, max_answer_bytes: int) -> None:
        if epoch != self._epoch or not self._is_up:
            return
        now_s = self._loop.time()
        self._unanswered.append((now_s, max_answer_bytes))
        self._unsent.append(data)
        self._stream.wake()
        if self._timer is None:
            self._timer = self._loop.call_at(now_s + self._deadline_s, self._check_deadline)

    def _fail(self, epoch: int, reason: str) -> None:
        if epoch == self._epoch and not self._is_closed:
            self._stream.fail(PeerError(reason))

    async def greet(self, call: Call[bytes, bytes]) -> None:
        """PeerHandler: a drafter answers once it serves."""
        await call.write(wire.greeting())
        if not wire.is_greeting(await call.read()):
            raise PeerError("the greeting was not answered")

    def on_up(self) -> None:
        """PeerHandler."""
        self._epoch += 1
        self._is_up = True
        self._post(DrafterUp(link=self, epoch=self._epoch))

    def next_request(self) -> bytes | None:
        """PeerHandler: hot path."""
        return self._unsent.popleft() if self._unsent else None

    def on_response(self, response: bytes) -> None:
        """PeerHandler: hot path."""
        if not self._unanswered:
            self._fault = DrafterFault.PROTOCOL_ERROR
            raise PeerError("an answer came that nothing asked for")
        sent_s, max_answer_bytes = self._unanswered.popleft()
        if len(response) > max_answer_bytes:
            self._fault = DrafterFault.PROTOCOL_ERROR
            raise PeerError(f"an answer of {len(response)} bytes is too long")
        self._post(
            DrafterAnswered(
                link=self, epoch=self._epoch, data=response, received_at_s=time.monotonic()
            )
        )
        now_s = self._loop.time()
        if now_s < sent_s + self._deadline_s:
            self._num_late = 0
            if now_s > self._last_late_s + _FORGIVEN_AFTER_S:
                self._pause_s = _FIRST_PAUSE_S
        if self._is_aside and not self._unanswered:
            self._cancel_timer()
            self._timer = self._loop.call_later(self._pause_s, self._come_back)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def on_down(self, reason: str) -> None:
        """PeerHandler."""
        self._forget_stream()
        self._report_down(reason, self._fault)
        self._fault = None

    def on_unreachable(self, reason: str) -> None:
        """PeerHandler."""
        self._report_down(reason)

    def _report_down(self, reason: str, fault: DrafterFault | None = None) -> None:
        if not self._is_closed:
            self._post(DrafterDown(link=self, reason=reason, fault=fault))

    def _on_internal_error(self, error: Exception) -> None:
        self._report_down(repr(error), DrafterFault.INTERNAL_ERROR)

    def _forget_stream(self) -> None:
        self._is_up = False
        self._unsent.clear()
        self._unanswered.clear()
        self._num_late = 0
        self._is_aside = False
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        # One timer for all requests: it is set for the oldest one.
        self._timer = None
        if not self._unanswered:
            return
        now_s = self._loop.time()
        sent_s, _ = self._unanswered[0]
        due_s = sent_s + self._deadline_s
        if now_s >= sent_s + self._deadline_s * _GONE_AFTER_DEADLINES:
            self._stream.fail(
                PeerError(f"no answer within {self._deadline_s * _GONE_AFTER_DEADLINES:g} s")
            )
            return
        if now_s >= due_s:
            due_s = now_s + self._deadline_s
            self._last_late_s = now_s
            self._num_late += 1
            if not self._is_aside:
                self._is_aside = self._num_late >= _LATE_UNTIL_ASIDE
                self._post(DrafterLate(link=self, is_aside=self._is_aside))
        self._timer = self._loop.call_at(due_s, self._check_deadline)

    def _come_back(self) -> None:
        self._timer = None
        self._is_aside = False
        self._num_late = 0
        self._post(DrafterBack(link=self))
        if self._unanswered:
            # Sent before the engine knew that the drafter was put aside.
            self._check_deadline()
