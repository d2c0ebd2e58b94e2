"""Pauses between attempts to reach a peer.

Owns how they grow; pure but for the injected randomness.
"""

import random
from collections.abc import Callable

_INITIAL_S = 0.05
_MAX_S = 2.0


class Backoff:
    """Doubles from 50 ms to 2 s, each pause shortened by up to a half at random.

    A stream that lasted for longer than the longest pause starts over; one that breaks as soon as
    it is up is not a success.
    """

    def __init__(self, random_fraction: Callable[[], float] = random.random) -> None:
        self._random_fraction = random_fraction
        self._pause_s = _INITIAL_S

    def next_pause_s(self, lasted_s: float) -> float:
        """How long to wait after a stream that was up for `lasted_s` (0: never)."""
        if lasted_s > _MAX_S:
            self._pause_s = _INITIAL_S
        pause_s = self._pause_s * (1 - self._random_fraction() / 2)
        self._pause_s = min(self._pause_s * 2, _MAX_S)
        return pause_s
