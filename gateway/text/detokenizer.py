"""Tokens to text as they come, one detokenizer per output.

Owns which text is final after each token. Knows no tokenizer: it is given a vocabulary's bytes, or
a function that decodes.

    ByteDetokenizer      for byte-level vocabularies: every token is a string of bytes
    WindowDetokenizer    for all others: decodes a short window of tokens again and again

`tokenizers.decoders.DecodeStream` (0.23) replaces neither: bytes that never become text are never
shown, not even at the end, and all of them are decoded again with each token (500 µs per token
after 1,500 of them; a window takes 8).
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

#: Stands for bytes that are not text.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes. What is not text after this many tokens will not become text.
_MAX_PENDING_TOKENS = 8

# Decoded at once, where there are so many.
_GROUP_TOKENS = 64


class Detokenizer(Protocol):
    """The text of one output as its tokens come. Special tokens are left out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Appends the next tokens and returns the text that became final with them."""

    def finish(self) -> str:
        """Ends the output: returns the text of an incomplete character at its end."""

    def copy(self) -> "Detokenizer":
        """An independent detokenizer in the same state."""


class ByteDetokenizer:
    """Joins the tokens' bytes and decodes them as they become whole characters.

    Constant work per token, and the same text as decoding everything at once: both put one
    U+FFFD for each maximal part of an ill-formed sequence (Unicode 15, section 3.9).
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def copy(self) -> "ByteDetokenizer":
        copy = ByteDetokenizer(self._bytes_of)
        copy._decoder.setstate(self._decoder.getstate())
        return copy


class WindowDetokenizer:
    """Decodes the last tokens together with some that precede them.

    For vocabularies whose decoder looks at neighbours (SentencePiece's leading space, byte
    fallback). The window is `context + pending`: the text of the context has been returned, that
    of the pending tokens has not. The text ends in U+FFFD while a character is incomplete.

    The text is the same however the tokens are divided. It equals that of decoding everything at
    once except inside runs of byte-fallback tokens that are not valid UTF-8: there the whole run
    decides, and a stream cannot wait for its end.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        # The first pending tokens, as long as none of them had a text.
        self._num_without_text = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        parts = []
        for first in range(0, len(token_ids), _GROUP_TOKENS):
            group = token_ids[first : first + _GROUP_TOKENS]
            if len(group) > 1:
                before = len(self._window)
                self._window += group
                text = self._advance(max_pending=None)
                if text:
                    parts.append(text)
                    continue
                # The group has bytes that are no text, or no text: feed its tokens one by one.
                del self._window[before:]
                num_pending = before - self._num_context
                self._num_without_text = min(self._num_without_text, num_pending)
            for token_id in group:
                self._window.append(token_id)
                parts.append(self._advance(max_pending=_MAX_PENDING_TOKENS))
        return "".join(parts)

    def finish(self) -> str:
        return self._advance(max_pending=0)

    def copy(self) -> "WindowDetokenizer":
        copy = WindowDetokenizer(self._decode)
        copy._window = self._window.copy()
        copy._num_context = self._num_context
        copy._num_without_text = self._num_without_text
        return copy

    def _advance(self, *, max_pending: int | None) -> str:
        """`max_pending`: if more tokens wait, bytes that are no text are shown; None: never."""
        context_text = self._decode(self._window[: self._num_context])
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        if len(text) <= len(context_text):
            self._num_without_text = num_pending
            if max_pending is not None and num_pending > max_pending:
                # Tokens without text are no context: after them, a word would lose its space.
                del self._window[self._num_context :]
                self._num_without_text = 0
            return ""
        if max_pending is None:
            if REPLACEMENT in text[len(context_text) :]:
                return ""
        # Special tokens may come before a character of several tokens.
        elif text.endswith(REPLACEMENT) and num_pending - self._num_without_text <= max_pending:
            return ""
        # The pending tokens become the context.
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_without_text = 0
        return text[len(context_text) :]
