"""Turns in which requests begin, so that what begins never holds up what runs.

Of all that an event loop does for a request, its beginning takes the longest. So few begin in each
iteration of the loop, in the order in which they came, and in between the loop does all that is
ready: it answers health checks, and carries the output of what runs. One whose client has gone by
its turn goes no further. On the event loop; knows no request.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# In one iteration. Those that begin together reach the verifier in one message and run in one step,
# which saves both a part of their work; more of them would hold up the others.
MAX_TURNS = 4
# In one iteration: to drop one costs little, but not nothing.
_MAX_DROPPED = 16


class ClientGoneError(Exception):
    """The client closed the connection: nobody waits for an answer."""


class _Waiting(NamedTuple):
    has_turn: asyncio.Future[bool]
    is_gone: Callable[[], bool]


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        """Begins without requests that wait."""
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        # Turns of this iteration that are taken; while any is, `_give` is scheduled.
        self._num_taken = 0

    async def take(self, is_gone: Callable[[], bool]) -> None:
        """Returns when the caller may begin, or take another of its steps.

        Args:
            is_gone: whether the caller's client has gone; asked when its turn has come.

        Raises:
            ClientGoneError: it has.
        """
        if self._num_taken < MAX_TURNS and not self._waiting:
            if is_gone():
                raise ClientGoneError
            if not self._num_taken:
                self._loop.call_soon(self._give)
            self._num_taken += 1
            return
        has_turn: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append(_Waiting(has_turn, is_gone))
        if not await has_turn:
            raise ClientGoneError

    def _give(self) -> None:
        self._num_taken = 0
        for _ in range(min(len(self._waiting), _MAX_DROPPED)):
            waiting = self._waiting.popleft()
            if waiting.has_turn.done():
                continue
            is_given = not waiting.is_gone()
            waiting.has_turn.set_result(is_given)
            self._num_taken += is_given
            if self._num_taken == MAX_TURNS:
                break
        if self._waiting or self._num_taken:
            self._loop.call_soon(self._give)
