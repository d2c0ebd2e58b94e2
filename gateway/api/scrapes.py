"""Answers scrapes of the metrics on the event loop, however many come.

Rendering takes milliseconds of the interpreter, beside the streams, and whoever reaches the port
may ask. So one text is rendered at a time, for all who asked for its format before; and nothing is
rendered in nine tenths of the time.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from servicekit.telemetry.metrics import Exposition, choose_format

# After a text, for so many times as long as it took, none is rendered.
_REST = 9.0
# Far less than a scraper waits.
_MOST_REST_S = 1.0


class Scrapes:
    """Of one registry; on the event loop."""

    def __init__(self, exposition: Exposition) -> None:
        """Begins without scrapes."""
        self._exposition = exposition
        self._rendering = asyncio.Lock()
        # By content type: those that wait for `_rendering`.
        self._waiting: dict[str, asyncio.Task[bytes]] = {}
        self._rested_at_s = 0.0

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """All metrics, as they are now or later: the text, and its content type.

        Args:
            accept: the scraper's header of that name; it chooses the format.
        """
        encode, content_type = choose_format(accept)
        if content_type not in self._waiting:
            rendering = asyncio.create_task(self._render(encode, content_type))
            self._waiting[content_type] = rendering
        # A scraper that goes away ends nobody else's.
        return await asyncio.shield(self._waiting[content_type]), content_type

    async def _render(self, encode: Callable[[Exposition], bytes], content_type: str) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._rendering:
            await asyncio.sleep(max(0.0, self._rested_at_s - loop.time()))
            del self._waiting[content_type]
            # In a thread, so that the loop goes on.
            text, took_s = await run_in_threadpool(_timed, encode, self._exposition)
            self._rested_at_s = loop.time() + min(_REST * took_s, _MOST_REST_S)
            return text


def _timed(encode: Callable[[Exposition], bytes], exposition: Exposition) -> tuple[bytes, float]:
    """The text, and how much of the processor's time it took, in seconds."""
    began_s = time.thread_time()
    text = encode(exposition)
    return text, time.thread_time() - began_s
