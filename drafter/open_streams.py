"""The streams that are open: what each waits for, and what ends such a wait.

A wait for the client's next message ends when the service drains; a wait for the client to read
ends after a time. Messages are many, and a timer for each would cost as much as a small answer: a
stream only puts down what it waits for, and one timer looks at all streams now and then. Owned by
the event loop. Does not know what streams carry.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from drafter.errors import NotServingError, UnreadAnswersError

_LOOKS_PER_TIMEOUT = 8


class OpenStream:
    """What one stream waits for; put down by its own task.

    Attributes:
        is_waiting: for the client's next message.
        writing_since_s: since when for the transport to take an answer, by the loop's clock; None:
            it does not.
    """

    def __init__(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        self.is_waiting = False
        self.writing_since_s: float | None = None
        self._limit = limit
        self._loop = loop
        self._is_ending = False

    def begin_wait(self) -> None:
        """What is awaited next is the client's message."""
        self.is_waiting = True

    def begin_write(self) -> None:
        """What is awaited next is that the transport takes an answer."""
        self.writing_since_s = self._loop.time()

    def go_on(self) -> None:
        """What was awaited has come; what was to end the wait is too late."""
        self.is_waiting = False
        self.writing_since_s = None
        if self._is_ending:
            self._is_ending = False
            self._limit.reschedule(None)

    def end_wait(self) -> None:
        """Ends the stream, if what it waits for does not come before the loop's next turn."""
        if not self._is_ending:
            self._is_ending = True
            self._limit.reschedule(self._loop.time())


class OpenStreams:
    """All streams of a service.

    Attributes:
        all_closed: set while there are none.
    """

    def __init__(self, *, unread_timeout_s: float) -> None:
        """There are none.

        Args:
            unread_timeout_s: how long a stream may leave an answer unread; an eighth more may pass
                until that is seen.
        """
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self._unread_timeout_s = unread_timeout_s
        self._streams: set[OpenStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._streams)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[OpenStream]:
        """A stream, for as long as the context lasts.

        Raises:
            NotServingError: `end_waits` has ended it.
            UnreadAnswersError: its client does not read.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        stream = OpenStream(limit, loop)
        self._streams.add(stream)
        self.all_closed.clear()
        if self._timer is None:
            self._look(loop)
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

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the streams whose clients have not read for too long, now and ever again."""
        latest_s = loop.time() - self._unread_timeout_s
        for stream in self._streams:
            if stream.writing_since_s is not None and stream.writing_since_s <= latest_s:
                stream.end_wait()
        self._timer = None
        if self._streams:
            pause_s = self._unread_timeout_s / _LOOKS_PER_TIMEOUT
            self._timer = loop.call_later(pause_s, self._look, loop)
