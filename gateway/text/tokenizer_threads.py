"""Threads for long texts: reading, encoding and decoding them must not block the event loop.

Owns the threads: one per size of work, so that short work never waits for long work. Knows no
tokenizer and no request.
"""

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# Less work takes less time than handing it to a thread and back.
_MAX_INLINE_BYTES = 2_000

# The largest work of each thread but the last, which does all larger work.
_MAX_BYTES = (32 * 1024, 256 * 1024)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TokenizerThreads:
    """Runs functions: short work on the event loop, long work in threads."""

    def __init__(self) -> None:
        """Starts the threads.

        Raises:
            RuntimeError: one cannot be started.
        """
        self._executors = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer-{index}")
            for index in range(len(_MAX_BYTES) + 1)
        ]
        for executor in self._executors:
            # Now, and not with the first long text: then there may be no thread left.
            executor.submit(int)

    async def run(
        self,
        num_bytes: int,
        function: Callable[_P, _T],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Returns or raises what the function does, in the caller's context; a cancelled call that
        waits never begins.

        Args:
            num_bytes: the size of the text.
            function: changes nothing that another thread reads meanwhile.
            args, kwargs: the function's.
        """
        if num_bytes <= _MAX_INLINE_BYTES:
            return function(*args, **kwargs)
        index = sum(num_bytes > max_bytes for max_bytes in _MAX_BYTES)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._executors[index], lambda: context.run(function, *args, **kwargs)
        )

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
