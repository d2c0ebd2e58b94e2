"""Back-pressure from the engine to one session: reading stops while too much is unhandled.

A submitted command costs its tokens plus `COMMAND_COST`, about the time to check and handle it.
After every `WINDOW_COST` the session queues a marker; it reads on only when the engine has handled
the marker before that. So the engine's queue holds at most two windows of a session and one more
command or slice. An ordinary session never waits; one that sends without end is slowed by its
transport, alone.
"""

import asyncio

from verifier.engine.engine import Engine

COMMAND_COST = 512
# Handled between two returns to the event loop; a few milliseconds.
SLICE_COST = 1 << 16
WINDOW_COST = 1 << 17


class CommandFlow:
    """Owned by the session, on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cost = 0
        self._marker: asyncio.Future[None] | None = None

    async def submitted(self, cost: int) -> None:
        """Counts submitted commands. Waits if too many are unhandled; yields to the event loop
        after a slice of work; else returns at once.
        """
        self._cost += cost
        if cost >= SLICE_COST:
            await asyncio.sleep(0)
        if self._cost >= WINDOW_COST:
            self._cost = 0
            before = self._marker
            self._marker = asyncio.wrap_future(self._engine.call(_do_nothing))
            if before is not None:
                await before


def _do_nothing() -> None:
    pass
