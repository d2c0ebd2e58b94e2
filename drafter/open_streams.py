"""The open streams: what each of them waits for, and what ends such a wait.

A wait for the client's next message ends when the service drains; a wait for the client to read
ends after a timeout. A timer per message would cost as much as a small answer, so a stream only
records what it waits for, and one timer checks all streams from time to time. Owned by the event
loop. Does not know what streams carry.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from drafter.errors import NotServingError, UnreadAnswersError

_CHECKS_PER_TIMEOUT = 8


class OpenStream:
    """What one stream waits for; recorded by its own task.

    Attributes:
        is_waiting: whether it waits for the client's next message.
        writing_since_s: since when it waits for the transport to accept an answer, by the loop's
            clock; None: it does not.
    """

    def __init__(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        self.is_waiting = False
        self.writing_since_s: float | None = None
        self._limit = limit
        self._loop = loop
        self._is_ending = False

    def begin_wait(self) -> None:
        """Records that the client's message is awaited next."""
        self.is_waiting = True

    def begin_write(self) -> None:
        """Records that an answer is written next."""
        self.writing_since_s = self._loop.time()

    def go_on(self) -> None:
        """Records that the wait is over; cancels `end_wait` if that was too late."""
        self.is_waiting = False
        self.writing_since_s = None
        if self._is_ending:
            self._is_ending = False
            self._limit.reschedule(None)

    def end_wait(self) -> None:
        """Ends the stream, unless its wait is over before the loop's next iteration."""
        if not self._is_ending:
            self._is_ending = True
            self._limit.reschedule(self._loop.time())


class OpenStreams:
    """All streams of a service. One may leave an answer unread for the timeout and an eighth.

    Attributes:
        all_closed: set while there are none.
    """

    def __init__(self, *, unread_timeout_s: float) -> None:
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self._unread_timeout_s = unread_timeout_s
        self._streams: set[OpenStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._streams)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[OpenStream]:
        """Opens a stream for the duration of the context.

        Raises:
            NotServingError: `end_waits` ended it.
            UnreadAnswersError: its client does not read.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        stream = OpenStream(limit, loop)
        self._streams.add(stream)
        self.all_closed.clear()
        if self._timer is None:
            self._check(loop)
        try:
            async with limit:
                yield stream
        except TimeoutError:
            if not limit.expired():
                raise
            if stream.is_waiting:
                raise NotServingError("the drafter is shutting down") from None
            raise UnreadAnswersError(self._unread_timeout_s) from None
        finally:
            self._streams.discard(stream)
            if not self._streams:
                self.all_closed.set()

    def end_waits(self) -> None:
        """Ends all streams that wait for their client's next message."""
        for stream in self._streams:
            if stream.is_waiting:
                stream.end_wait()

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends streams whose clients have not read for too long; repeats while any is open."""
        latest_s = loop.time() - self._unread_timeout_s
        for stream in self._streams:
            if stream.writing_since_s is not None and stream.writing_since_s <= latest_s:
                stream.end_wait()
        self._timer = None
        if self._streams:
            pause_s = self._unread_timeout_s / _CHECKS_PER_TIMEOUT
            self._timer = loop.call_later(pause_s, self._check, loop)
