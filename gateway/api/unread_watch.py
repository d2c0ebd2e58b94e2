"""Clients that are being written to, and which of them stopped reading.

Owns how long a write may wait until its call is ended. A timer for each write would cost as much
as a small message: a call only notes since when it writes, and one timer looks at all calls now
and then. Owned by the event loop. Knows neither requests nor gRPC.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from gateway.errors import OverloadedError

_LOOKS_PER_TIMEOUT = 8


class Reader:
    """One call's client; used by the call's own task."""

    def __init__(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        self._limit = limit
        self._loop = loop
        self._writing_since_s: float | None = None
        self._is_ending = False

    def begin_write(self) -> None:
        """What is awaited next is that the transport takes a message."""
        self._writing_since_s = self._loop.time()

    def end_write(self) -> None:
        """It was taken; what was to end the wait is too late."""
        self._writing_since_s = None
        if self._is_ending:
            self._is_ending = False
            self._limit.reschedule(None)

    def end_if_unread_since(self, latest_s: float) -> None:
        """Ends the call, if its message has waited since then and is not taken at once."""
        since_s = self._writing_since_s
        if since_s is not None and since_s <= latest_s and not self._is_ending:
            self._is_ending = True
            self._limit.reschedule(self._loop.time())


class Readers:
    """All clients that are being written to."""

    def __init__(self, *, unread_timeout_s: float, on_unread: Callable[[Exception], None]) -> None:
        """There are none.

        Args:
            unread_timeout_s: how long a message may wait to be taken; an eighth more may pass
                until that is seen.
            on_unread: told of every call that is ended, with its error.
        """
        self._unread_timeout_s = unread_timeout_s
        self._on_unread = on_unread
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[Reader]:
        """A call's client, for as long as the context lasts.

        Raises:
            OverloadedError: the client does not read.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        reader = Reader(limit, loop)
        self._readers.add(reader)
        if self._timer is None:
            self._look(loop)
        try:
            async with limit:
                yield reader
        except TimeoutError:
            if not limit.expired():
                raise
            error = OverloadedError(f"output was left unread for {self._unread_timeout_s} s")
            self._on_unread(error)
            raise error from None
        finally:
            self._readers.discard(reader)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the calls whose clients have not read for too long, now and ever again."""
        latest_s = loop.time() - self._unread_timeout_s
        for reader in self._readers:
            reader.end_if_unread_since(latest_s)
        self._timer = None
        if self._readers:
            pause_s = self._unread_timeout_s / _LOOKS_PER_TIMEOUT
            self._timer = loop.call_later(pause_s, self._look, loop)
