"""Stop strings across token borders.

Owns what of a growing text may already be shown, given the strings that end it. Knows no tokens.
"""

import copy
from collections.abc import Sequence


class StopStrings:
    """Watches one text for the first of some strings to be complete.

    The string whose last character comes first ends the text; of two that end at the same
    character, the one that began first. So the answer does not depend on the pieces in which the
    text arrives.

    Owned by one `OutputText`. Invariant: the held text is always the longest end of the text that
    one of the strings begins with.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        """Watches for non-empty strings; none of them is fine too."""
        assert all(stop_sequences), "an empty stop string would end every text at once"
        self._stops = tuple(stop_sequences)
        self._beginnings = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._most_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self.stopped = False

    def copy(self) -> "StopStrings":
        """Another one that has seen the same text."""
        return copy.copy(self)  # all that it holds is immutable

    def feed(self, text: str) -> str:
        """Takes the text's next piece and returns what can be shown for certain.

        After the piece that completes a stop string, `stopped` is true, the result is what was
        left before that string, and nothing may be fed any more.
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
        for start in range(max(0, len(text) - self._most_held), len(text)):
            if text[start:] in self._beginnings:
                self._held = text[start:]
                return text[:start]
        self._held = ""
        return text

    def finish(self) -> str:
        """The text is over: returns what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
