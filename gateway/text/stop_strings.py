"""Stop strings across token borders.

Owns which part of a growing text may be shown already. Knows no tokens.
"""

import copy
from collections.abc import Sequence


class StopStrings:
    """Finds the first of some strings that a growing text completes.

    The string whose last character comes first ends the text; of two that end at the same
    character, the one that began first. So the answer does not depend on the pieces in which the
    text arrives.

    Owned by one `OutputText`. Invariant: the held text is the longest suffix of the text that is a
    prefix of one of the strings.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        """Begins with an empty text; there may be no stop string."""
        assert all(stop_sequences), "an empty stop string would end every text at once"
        self._stops = tuple(stop_sequences)
        self._prefixes = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self.stopped = False

    def copy(self) -> "StopStrings":
        """An independent one in the same state."""
        return copy.copy(self)  # every attribute is immutable

    def feed(self, text: str) -> str:
        """Appends the text's next piece and returns the text that can be shown.

        After the piece that completes a stop string, `stopped` is true, the result is the text
        before that string, and nothing may be fed any more.
        """
        assert not self.stopped
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            end, negative_length = min(found)
            self.stopped = True
            self._held = ""
            return text[: end + negative_length]
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start:] in self._prefixes:
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text

    def finish(self) -> str:
        """Ends the text: returns what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
