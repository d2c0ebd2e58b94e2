"""Where text is encoded and decoded: long work beside the event loop, short work on it.

Owns the threads. There is one for each size of work, so that a long text waits for other long ones,
and a short one never for a long one. Knows no tokenizer and no request.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import ParamSpec, TypeVar

# Less work takes less time than to hand it to a thread and back.
_MOST_INLINE_BYTES = 2_000

# The largest work of each thread but the last, which does what is larger still.
_MOST_BYTES = (32 * 1024, 256 * 1024)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TokenizerThreads:
    """Runs functions; on the event loop, which is never held up by more than short work."""

    def __init__(self) -> None:
        self._executors = [
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer-{index}")
            for index in range(len(_MOST_BYTES) + 1)
        ]

    async def run(
        self,
        num_bytes: int,
        function: Callable[_P, _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """What the function returns or raises; it is not begun where the caller gave up before.

        Args:
            num_bytes: how much text it is about.
            function: changes nothing that another thread looks at meanwhile.
            args, kwargs: what it is called with.
        """
        if num_bytes <= _MOST_INLINE_BYTES:
            return function(*args, **kwargs)
        index = sum(num_bytes > most for most in _MOST_BYTES)
        return await asyncio.get_running_loop().run_in_executor(
            self._executors[index], lambda: function(*args, **kwargs)
        )

    def close(self) -> None:
        """Lets the threads go; what has not begun never will."""
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)
