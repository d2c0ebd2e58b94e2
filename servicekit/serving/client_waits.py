"""Ends calls that wait for their clients: too long for them to read, or for their next message.

A timer per message would cost as much as a small message, so a call only records what it waits for,
and one timer checks all calls from time to time. Owned by the event loop. Does not know what calls
carry, nor gRPC.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable

MakeError = Callable[[], Exception]

_CHECKS_PER_TIMEOUT = 8

_present: contextvars.ContextVar["ClientCall | None"] = contextvars.ContextVar(
    "present", default=None
)


def is_left_unread() -> bool:
    """Whether the present call is being ended because its client does not read."""
    call = _present.get()
    return call is not None and call.end is not None and call.is_writing


class ClientCall:
    """What one call waits for; recorded by its own task.

    Attributes:
        is_reading: whether it waits for the client's next message.
        is_writing: whether it waits for the transport to accept a message.
        num_checks: how many checks have found that same message unaccepted. They are counted, and
            not the time, so that a suspended process takes no client for one that does not read.
        end: makes the error that it is being ended with; None: it is not being ended.
    """

    def __init__(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        self.is_reading = False
        self.is_writing = False
        self.num_checks = 0
        self.end: MakeError | None = None
        self._limit = limit
        self._loop = loop

    def begin_read(self) -> None:
        """Records that the client's message is awaited next."""
        self.is_reading = True

    def begin_write(self) -> None:
        """Records that a message is written next."""
        self.is_writing = True
        self.num_checks = 0

    def go_on(self) -> None:
        """Records that the wait is over; cancels `end_wait` if that was too late."""
        self.is_reading = False
        self.is_writing = False
        if self.end is not None:
            self.end = None
            self._limit.reschedule(None)

    def end_wait(self, make_error: MakeError) -> None:
        """Ends the call, unless its wait is over before the loop's next iteration."""
        if self.end is None:
            self.end = make_error
            self._limit.reschedule(self._loop.time())


class ClientWaits:
    """All calls of a service. One may leave a message unread for the timeout and an eighth.

    Attributes:
        all_closed: set while there are none.
    """

    def __init__(self, *, unread_timeout_s: float, make_unread_error: MakeError) -> None:
        """Begins without calls.

        Args:
            unread_timeout_s: how long the transport may take to accept a message.
            make_unread_error: called for every call that ends because its client does not read.
        """
        self.all_closed = asyncio.Event()
        self.all_closed.set()
        self._unread_timeout_s = unread_timeout_s
        self._make_unread_error = make_unread_error
        self._calls: set[ClientCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[ClientCall]:
        """Opens a call for the duration of the context, which raises the error that ends it."""
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        call = ClientCall(limit, loop)
        self._calls.add(call)
        self.all_closed.clear()
        before = _present.set(call)
        if self._timer is None:
            self._check(loop)
        try:
            async with limit:
                yield call
        except TimeoutError:
            if call.end is None or not limit.expired():
                raise
            raise call.end() from None
        finally:
            _present.reset(before)
            self._calls.discard(call)
            if not self._calls:
                self.all_closed.set()

    def end_reads(self, make_error: MakeError) -> None:
        """Ends all calls that wait for their client's next message."""
        for call in self._calls:
            if call.is_reading:
                call.end_wait(make_error)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends calls whose clients have not read for too long; repeats while any is open."""
        for call in self._calls:
            if call.is_writing:
                call.num_checks += 1
                if call.num_checks > _CHECKS_PER_TIMEOUT:
                    call.end_wait(self._make_unread_error)
        self._timer = None
        if self._calls:
            pause_s = self._unread_timeout_s / _CHECKS_PER_TIMEOUT
            self._timer = loop.call_later(pause_s, self._check, loop)
