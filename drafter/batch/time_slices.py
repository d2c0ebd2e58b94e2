"""Whose turn it is on the event loop: live batches at once, replayed histories behind them.

A *live* batch brings each sequence a few new tokens, and a verifier may wait for its proposals. A
*bulk* batch brings long text: a prompt, or a history replayed in pieces. Together they would keep
the loop for long: an answer passes through some ten turns of the loop from its arrival to the
wire, and each of them could cost a slice of every bulk batch. So bulk batches go one at a time,
however many streams bring them; and while there is live traffic, the loop is left alone after each
slice for as long as a live batch takes on its way. Without live traffic nothing is held back.

Owned by the event loop. Knows no batches: whoever answers them says when a slice begins and ends.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

SLICE_S = 0.001
"""How long a batch may keep the event loop before others get a turn."""

PAUSE_S = 0.001
"""How long bulk leaves the loop alone after a slice: half of its time, and no gateway's replay
comes anywhere near its deadline."""

LIVE_FOR_S = 0.1
"""There is live traffic if there was a live batch within this time: some steps of a verifier."""


class Turn:
    """One batch's permission to work; look at `is_over` between any two pieces of work.

    Attributes:
        held_back_s: how long it was made to wait because it is bulk.
    """

    def __init__(self, turns: "Turns", *, is_bulk: bool, held_back_s: float = 0.0) -> None:
        self._turns = turns
        self._is_bulk = is_bulk
        self.held_back_s = held_back_s
        self._slice_end_s = turns.clock() + SLICE_S

    @property
    def is_over(self) -> bool:
        """Whether the slice is used up: time to `pause`."""
        return self._turns.clock() > self._slice_end_s

    async def pause(self) -> None:
        """Lets others work; returns when the next slice has begun."""
        if self._is_bulk:
            start_s = self._turns.clock()
            await self._turns.rest()
            self.held_back_s += self._turns.clock() - start_s
        else:
            await asyncio.sleep(0)
        self._slice_end_s = self._turns.clock() + SLICE_S


class Turns:
    """Hands out turns; one for all streams.

    Invariant: at most one bulk batch has a turn.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._bulk = asyncio.Lock()
        self._last_live_s = -LIVE_FOR_S
        self._rested_at_s = 0.0

    @contextlib.asynccontextmanager
    async def take(self, *, is_bulk: bool) -> AsyncIterator[Turn]:
        """Waits for the batch's turn; bulk batches get it in the order of their coming."""
        if not is_bulk:
            self.note_live()
            yield Turn(self, is_bulk=False)
            return
        start_s = self.clock()
        async with self._bulk:
            try:
                await self.wait_until_rested()
                yield Turn(self, is_bulk=True, held_back_s=self.clock() - start_s)
            finally:
                self.end_slice()

    def note_live(self) -> None:
        """Says that a live batch was answered which took no turn, being done in one go."""
        self._last_live_s = self.clock()

    @property
    def is_rested(self) -> bool:
        """Whether the next slice of bulk may begin."""
        return not self._is_live or self.clock() >= self._rested_at_s

    async def rest(self) -> None:
        """Ends a slice of bulk, and waits until the next may begin."""
        self.end_slice()
        await self.wait_until_rested()

    def end_slice(self) -> None:
        """Says that a slice of bulk has ended."""
        self._rested_at_s = self.clock() + PAUSE_S

    async def wait_until_rested(self) -> None:
        """Waits until the next slice of bulk may begin, or nearly so."""
        pause_s = self._rested_at_s - self.clock()
        await asyncio.sleep(max(pause_s, 0.0) if self._is_live else 0.0)

    @property
    def _is_live(self) -> bool:
        return self.clock() - self._last_live_s < LIVE_FOR_S
