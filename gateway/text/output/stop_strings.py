"""Stop strings across token borders.

Owns where a text ends by one of them, and which end of a text may be the beginning of one. Knows no
tokens. Immutable.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Stop(NamedTuple):
    """Where a stop string stands in a text."""

    start: int
    end: int


class StopStrings:
    """Finds the first of some strings that a growing text completes.

    The string whose last character comes first ends the text; of two that end at the same
    character, the one that began first. So the answer does not depend on the pieces in which the
    text arrives.
    """

    def __init__(self, stop_sequences: Sequence[str] = ()) -> None:
        """There may be no stop string."""
        assert all(stop_sequences), "an empty stop string would end every text at once"
        self._stops = tuple(stop_sequences)
        self._prefixes = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)

    def find(self, text: str, num_searched: int, end: int) -> Stop | None:
        """The first that the text completes.

        Args:
            num_searched: only one that ends behind so many characters.
            end: only one that ends there at the latest.
        """
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, num_searched - len(stop) + 1), end)
            if start >= 0:
                found.append(Stop(start, start + len(stop)))
        return min(found, key=lambda each: (each.end, each.start), default=None)

    def num_begun(self, text: str) -> int:
        """How many of the text's last characters may begin a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
