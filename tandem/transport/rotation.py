"""Which of several gateways gets the next call.

Owns the order and who is left out. Knows no channel: gateways are numbers from 0.
"""

import random
import threading
import time
from collections.abc import Callable

# How long a gateway that failed is left out; doubles while it goes on failing.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 10.0


class Rotation:
    """Round robin over gateways that work; threads may share it.

    One that failed is left out for a while, then the next call tries it. When all are left out, the
    one that has waited longest is tried.
    """

    def __init__(self, num_gateways: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins anywhere, so that many clients begin everywhere."""
        assert num_gateways > 0
        self._clock = clock
        self._lock = threading.Lock()
        self._next = random.randrange(num_gateways)
        self._left_out_until_s = [0.0] * num_gateways
        self._pauses_s = [_FIRST_PAUSE_S] * num_gateways

    def take(self) -> int:
        """Returns the gateway of the next call."""
        with self._lock:
            now_s = self._clock()
            num_gateways = len(self._pauses_s)
            in_turn = [(self._next + offset) % num_gateways for offset in range(num_gateways)]
            # min returns the first of equals: those that are not left out, in turn.
            taken = min(in_turn, key=lambda each: max(now_s, self._left_out_until_s[each]))
            self._next = (taken + 1) % num_gateways
            return taken

    def succeeded(self, gateway: int) -> None:
        """A call to it was answered."""
        with self._lock:
            self._left_out_until_s[gateway] = 0.0
            self._pauses_s[gateway] = _FIRST_PAUSE_S

    def failed(self, gateway: int) -> None:
        """It could not be reached, or could not serve. Many calls that fail at once count once."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._left_out_until_s[gateway]:
                return
            pause_s = self._pauses_s[gateway]
            self._left_out_until_s[gateway] = now_s + pause_s
            self._pauses_s[gateway] = min(2 * pause_s, _MAX_PAUSE_S)
