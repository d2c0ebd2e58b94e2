"""Back-pressure from the engine to one session: reading stops while too much is not yet handled.

What a session has submitted is counted in tokens, and each command as many tokens more, which is
about what it costs to check and to handle. After every window of it a marker is sent along; the
next window ends only when the engine has come to the marker of the one before. So the engine's
queue holds at most two windows of a session and what ended the last, an ordinary session never
waits, and one that sends without end is held up by its transport, alone.
"""

import asyncio

from verifier.engine.engine import Engine

COMMAND_COST = 512
# Reading goes on elsewhere after so much: a few milliseconds.
SLICE_COST = 1 << 16
WINDOW_COST = 1 << 17


class CommandFlow:
    """Owned by the session, on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cost = 0
        self._marker: asyncio.Future[None] | None = None

    async def submitted(self, cost: int) -> None:
        """Counts commands that were submitted. Waits if too much is in the queue, and lets the
        event loop do other things after much work; else returns at once.
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
