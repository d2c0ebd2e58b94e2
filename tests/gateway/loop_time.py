"""How long the gateway keeps the event loop busy at a time, in CPU time of the loop's thread.

CPU time, because the machine that runs the tests may be busy with other things. Only the tasks and
callbacks of gateway and servicekit count: scripted peers and clients run on the same loop.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gateway
import servicekit

_OWN_FOLDERS = (gateway.__path__[0], servicekit.__path__[0])

#: The limit; on a slow processor, `tests.processor_speed` allows more.
MAX_BUSY_S = 0.05


def freeze_heap() -> None:
    """Excludes what the tests have loaded from garbage collections, as a gateway that serves does.

    For good: to collect all of it takes up to a second, before every measurement.
    """
    gc.collect()
    gc.freeze()


class LoopTime:
    """The longest uninterrupted time, and the callback that took it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.what = ""
        self.num_callbacks = 0


@contextlib.contextmanager
def measured() -> Iterator[LoopTime]:
    """Measures every callback of the gateway's until the context ends."""
    found = LoopTime()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        what = _what(handle)
        begin_s = time.thread_time()
        run(handle)
        if what:
            found.num_callbacks += 1
            took_s = time.thread_time() - begin_s
            if took_s > found.longest_s:
                found.longest_s, found.what = took_s, what

    freeze_heap()
    with mock.patch.object(asyncio.Handle, "_run", timed):
        yield found


def _what(handle: asyncio.Handle) -> str:
    """The code of the gateway that a callback runs; "" if it runs none."""
    callback: Callable[..., Any] | None = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        code = getattr(owner.get_coro(), "cr_code", None)
        return (
            code.co_qualname
            if code is not None and code.co_filename.startswith(_OWN_FOLDERS)
            else ""
        )
    if type(owner).__module__.startswith(("gateway.", "servicekit.")):
        return getattr(callback, "__qualname__", "")
    return ""


class LoopMeter:
    """The longest iteration of the running event loop, in seconds of its thread's CPU time."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        loop: Any = asyncio.get_running_loop()
        turn = loop._run_once

        def measured_turn() -> None:
            start_s = time.thread_time()
            turn()
            self.longest_s = max(self.longest_s, time.thread_time() - start_s)

        freeze_heap()
        loop._run_once = measured_turn
        try:
            yield
        finally:
            del loop._run_once
