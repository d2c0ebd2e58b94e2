"""Time slices on the event loop: live batches at once, replayed histories behind them.

A *live* batch brings each sequence a few new tokens, and a verifier may wait for its proposals. A
*bulk* batch brings long text: a prompt, or a history replayed in pieces. An answer passes through
some ten turns of the event loop from its arrival to the wire, and each of them could cost a slice
of every bulk batch. So bulk batches go one at a time, however many streams bring them, and under
live traffic each slice is followed by a cool-down. Without live traffic nothing is held back.

Owned by the event loop. Does not know batches: whoever answers them says when a slice ends.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from drafter.budgets import COOL_DOWN_S, LIVE_FOR_S, SLICE_S


class TimeSlice:
    """One batch's permission to work; look at `is_over` between any two pieces of work.

    Attributes:
        held_back_s: how long it waited because it is bulk.
    """

    __slots__ = ("_end_s", "_is_bulk", "_slices", "held_back_s")

    def __init__(self, slices: "TimeSlices", *, is_bulk: bool, held_back_s: float = 0.0) -> None:
        self._slices = slices
        self._is_bulk = is_bulk
        self.held_back_s = held_back_s
        self._end_s = slices.clock() + SLICE_S

    @property
    def is_over(self) -> bool:
        """Whether the slice is used up: time to `pause`."""
        return self._slices.clock() > self._end_s

    async def pause(self) -> None:
        """Lets others work; returns when the next slice has begun."""
        if self._is_bulk:
            start_s = self._slices.clock()
            self._slices.end_bulk_slice()
            await self._slices.cool_down()
            self.held_back_s += self._slices.clock() - start_s
        else:
            await asyncio.sleep(0)
        self._end_s = self._slices.clock() + SLICE_S


class TimeSlices:
    """Hands out time slices; one for all streams.

    Invariant: at most one bulk batch has a slice.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._bulk = asyncio.Lock()
        self._last_live_s = -LIVE_FOR_S
        self._cool_at_s = 0.0

    def live(self) -> TimeSlice:
        """Returns the first slice of a live batch."""
        self._last_live_s = self.clock()
        return TimeSlice(self, is_bulk=False)

    @contextlib.asynccontextmanager
    async def bulk(self) -> AsyncIterator[TimeSlice]:
        """Waits for the first slice of a bulk batch; they get theirs in the order of arrival."""
        start_s = self.clock()
        async with self._bulk:
            try:
                await self.cool_down()
                yield TimeSlice(self, is_bulk=True, held_back_s=self.clock() - start_s)
            finally:
                self.end_bulk_slice()

    @property
    def is_cool(self) -> bool:
        """Whether the next slice of bulk may begin."""
        return not self._is_live or self.clock() >= self._cool_at_s

    def end_bulk_slice(self) -> None:
        """Records that a slice of bulk has ended."""
        self._cool_at_s = self.clock() + COOL_DOWN_S

    async def cool_down(self) -> None:
        """Waits until the next slice of bulk may begin, or nearly so."""
        pause_s = self._cool_at_s - self.clock()
        await asyncio.sleep(max(pause_s, 0.0) if self._is_live else 0.0)

    @property
    def _is_live(self) -> bool:
        return self.clock() - self._last_live_s < LIVE_FOR_S
