"""The events of several requests as one stream: a request for completions may have many prompts."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from gateway.messages.response import GenerateEvent

_Events = AsyncGenerator[GenerateEvent, None]


async def merge(
    streams: Sequence[_Events], starting: asyncio.Lock
) -> AsyncGenerator[tuple[int, GenerateEvent], None]:
    """Yields the events as they come, each with the index of its stream; closes the streams.

    Args:
        starting: of all that are merged: one begins its streams at a time. Of two whose requests
            are admitted by turns, both would find room for a part only, and fail.

    Raises:
        Exception: the first of any stream; the others are closed.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    # One element only: where a client reads slowly, its events are not read ahead.
    queue: asyncio.Queue[tuple[int, GenerateEvent | Exception | None]] = asyncio.Queue(1)
    tasks: list[asyncio.Task[None]] = []
    failed = asyncio.Event()
    num_left = len(streams)
    try:
        async with starting:
            for index, stream in enumerate(streams):
                tasks.append(asyncio.create_task(_pump(index, stream, queue, failed)))
                # Many short prompts encoded together would block the event loop.
                await asyncio.sleep(0)
                if failed.is_set():
                    # Where there is no room for one, each other would count as refused, too: in
                    # the metrics, and in when clients are told to repeat.
                    break
        while num_left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: _Events,
    queue: "asyncio.Queue[tuple[int, GenerateEvent | Exception | None]]",
    failed: asyncio.Event,
) -> None:
    try:
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                await queue.put((index, event))
    except Exception as error:
        failed.set()
        await queue.put((index, error))
    else:
        await queue.put((index, None))
