"""The text of one output: which part of it is final, and where a stop string ends it.

Owns the way from tokens to shown text, token by token. Knows no steps and no streams.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopStrings

_SKIPPED_AT_ONCE = 4096


class Shown(NamedTuple):
    """What some tokens brought.

    Attributes:
        text: that became final with them.
        num_tokens: how many of them belong to the output.
        token_texts: the parts of the text, one for each of these tokens, if they are reported:
            empty while a character or a possible stop string is incomplete.
    """

    text: str
    num_tokens: int
    token_texts: Sequence[str] = ()


class OutputText:
    """Turns one output's tokens into text until a stop string is complete.

    Owned by one `Generation`. Without a detokenizer there is no text, and no stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop_sequences: Sequence[str],
        *,
        min_tokens: int = 0,
        reports_tokens: bool = False,
    ) -> None:
        """Args:
        min_tokens: a stop string that one of so many first tokens completes is text.
        reports_tokens: whether the text of each token is told; the whole text is the same.
        """
        assert detokenizer is not None or not (stop_sequences or reports_tokens)
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_sequences) if stop_sequences else None
        self._max_stop_length = max(map(len, stop_sequences), default=0)
        # Tokens to come that complete no stop string.
        self._num_passed_over = min_tokens if stop_sequences else 0
        self._reports_tokens = reports_tokens

    def copy(self) -> "OutputText":
        """An independent one in the same state: for another choice of the same request."""
        copy = OutputText(
            None if self._detokenizer is None else self._detokenizer.copy(),
            (),
            reports_tokens=self._reports_tokens,
        )
        copy._stops = None if self._stops is None else self._stops.copy()
        copy._max_stop_length = self._max_stop_length
        copy._num_passed_over = self._num_passed_over
        return copy

    def skip(self, token_ids: Sequence[int]) -> None:
        """Appends tokens whose text the client already has, many at a time.

        Text that they leave incomplete, or held back for a stop string, comes with later tokens.
        """
        if self._detokenizer is None:
            return
        first = 0
        while first < len(token_ids) and not self.stopped:
            end = first + min(_SKIPPED_AT_ONCE, self._num_passed_over or _SKIPPED_AT_ONCE)
            group = token_ids[first:end]
            self._search(self._detokenizer.feed(group), len(group))
            first = end

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; then nothing may be fed."""
        return self._stops is not None and self._stops.stopped

    def feed(self, token_ids: Sequence[int]) -> Shown:
        """Appends the output's next tokens.

        Tokens after the one that completes a stop string do not belong to the output:
        `num_tokens` leaves them out.
        """
        if self._detokenizer is None:
            return Shown("", len(token_ids))
        if self._stops is None and not self._reports_tokens:
            return Shown(self._detokenizer.feed(token_ids), len(token_ids))
        texts = []
        for token_id in token_ids:
            texts.append(self._search(self._detokenizer.feed((token_id,)), 1))
            if self.stopped:
                break
        return Shown("".join(texts), len(texts), texts if self._reports_tokens else ())

    def finish(self) -> str:
        """Ends an output without a stop string: returns all text that was held back."""
        if self._detokenizer is None:
            return ""
        tail = self._detokenizer.finish()
        if self._stops is None:
            return tail
        if self._num_passed_over:
            return self._pass_over(self._stops, tail) + self._stops.finish()
        return self._stops.feed(tail) + self._stops.finish()

    def _search(self, text: str, num_tokens: int) -> str:
        """What can be shown of the next tokens' text; all of them are passed over, or none."""
        if self._stops is None:
            return text
        if not self._num_passed_over:
            return self._stops.feed(text)
        self._num_passed_over -= num_tokens
        return self._pass_over(self._stops, text)

    def _pass_over(self, stops: StopStrings, text: str) -> str:
        """What can be shown of a text that ends no output, and may begin a stop string."""
        tried = stops.copy()
        shown = tried.feed(text)
        if tried.stopped:
            text = stops.finish() + text
            for start in range(max(0, len(text) - self._max_stop_length), len(text) + 1):
                tried, shown = stops.copy(), text[:start]
                if not tried.feed(text[start:]) and not tried.stopped:
                    break
        self._stops = tried
        return shown
