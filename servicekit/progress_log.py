"""How far a long start is: lines in the log, for those who wait for it.

Owns their form, and how often they come. `tandem up` shows the last one.

    {"event": "loading", "part": "weights", "percent": 43}
    {"event": "loading", "part": "kernels", "compiled": 31}
"""

import time
from collections.abc import Callable

from servicekit.logs import Logger

#: What is over sooner has no line.
INTERVAL_S = 2.0


class ProgressLog:
    """The lines of one part of a start. For one thread at a time."""

    def __init__(
        self, part: str, logger: Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._part = part
        self._logger = logger
        self._clock = clock
        self._next_s = clock() + INTERVAL_S

    def show(self, **figures: int) -> None:
        """Writes a line, if one is due; may be called as often as something is done."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self._logger.info("loading", part=self._part, **figures)
