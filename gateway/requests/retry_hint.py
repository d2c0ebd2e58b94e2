"""How long a refused client should wait before it comes again.

Owns the counts of who was refused and who was served lately. While one of three requests is
served, the two that are refused will come again, beside new ones: told to wait for as many seconds
as there are refusals for each request served, they come back about as fast as there is room.
"""

from collections.abc import Callable

from gateway.errors import RETRY_AFTER_MS

MAX_RETRY_AFTER_MS = 30_000

# After so long a refusal or a service counts half.
_HALF_LIFE_S = 10.0


class RetryHint:
    """Counts that fade; on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begins with none. `clock` returns seconds, monotonic."""
        self._clock = clock
        self._counted_at_s = clock()
        self._num_refused = 0.0
        self._num_served = 0.0

    def count_served(self) -> None:
        """A choice got its first output."""
        self._fade()
        self._num_served += 1

    def refuse(self) -> int:
        """Counts a refusal, and returns when its client may come again, in milliseconds."""
        self._fade()
        refused_per_served = self._num_refused / (self._num_served + 1)
        self._num_refused += 1
        return round(min(MAX_RETRY_AFTER_MS, RETRY_AFTER_MS * (1 + refused_per_served)))

    def _fade(self) -> None:
        now_s = self._clock()
        rest = 0.5 ** ((now_s - self._counted_at_s) / _HALF_LIFE_S)
        self._counted_at_s = now_s
        self._num_refused *= rest
        self._num_served *= rest
