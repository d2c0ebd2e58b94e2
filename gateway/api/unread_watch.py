"""Ends the calls of clients that stop reading.

Owns how long a write may wait. A timer for each write would cost as much as a small message: a
call only records since when it writes, and one timer checks all calls at intervals. On the event
loop. Knows neither requests nor gRPC.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable

from gateway.errors import OverloadedError

_CHECKS_PER_TIMEOUT = 8

_watched: contextvars.ContextVar["WatchedCall | None"] = contextvars.ContextVar(
    "watched", default=None
)


def is_left_unread() -> bool:
    """Whether the present call is being ended because its client does not read."""
    call = _watched.get()
    return call is not None and call.is_ending


class WatchedCall:
    """One call that writes to its client; used by the call's own task.

    Attributes:
        is_ending: whether the call is being ended because its client does not read.
    """

    def __init__(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        self._limit = limit
        self._loop = loop
        self._writing_since_s: float | None = None
        self.is_ending = False

    def begin_write(self) -> None:
        """The call awaits that the transport accepts a message."""
        self._writing_since_s = self._loop.time()

    def end_write(self) -> None:
        """The message was accepted: the call does not end, even if that was decided."""
        self._writing_since_s = None
        if self.is_ending:
            self.is_ending = False
            self._limit.reschedule(None)

    def end_if_unread_since(self, latest_s: float) -> None:
        """Ends the call if its message has waited since then and is not accepted at once."""
        since_s = self._writing_since_s
        if since_s is not None and since_s <= latest_s and not self.is_ending:
            self.is_ending = True
            self._limit.reschedule(self._loop.time())


class UnreadWatch:
    """All calls that write to their clients."""

    def __init__(self, *, unread_timeout_s: float, on_unread: Callable[[Exception], None]) -> None:
        """Begins without calls.

        Args:
            unread_timeout_s: how long a message may wait; it takes an eighth more at most until
                that is noticed.
            on_unread: called with the error of every call that is ended.
        """
        self._unread_timeout_s = unread_timeout_s
        self._on_unread = on_unread
        self._calls: set[WatchedCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[WatchedCall]:
        """Watches a call for as long as the context lasts.

        Raises:
            OverloadedError: the client does not read.
        """
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        call = WatchedCall(limit, loop)
        self._calls.add(call)
        before = _watched.set(call)
        if self._timer is None:
            self._check(loop)
        try:
            async with limit:
                yield call
        except TimeoutError:
            if not limit.expired():
                raise
            error = OverloadedError(f"output was left unread for {self._unread_timeout_s} s")
            self._on_unread(error)
            raise error from None
        finally:
            _watched.reset(before)
            self._calls.discard(call)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the calls whose clients have not read for too long; repeats if there are calls."""
        latest_s = loop.time() - self._unread_timeout_s
        for call in self._calls:
            call.end_if_unread_since(latest_s)
        self._timer = None
        if self._calls:
            pause_s = self._unread_timeout_s / _CHECKS_PER_TIMEOUT
            self._timer = loop.call_later(pause_s, self._check, loop)
