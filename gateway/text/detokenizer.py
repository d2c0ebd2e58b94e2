"""Tokens to text as they come, one detokenizer per output.

Owns which text is final after each token. Knows no tokenizer: it is given a vocabulary's bytes, or
a function that decodes.

    ByteDetokenizer      for byte-level vocabularies: every token is a string of bytes
    WindowDetokenizer    for all others: decodes a short window of tokens again and again
    FallbackDetokenizer  around the latter, where some tokens are single bytes (SentencePiece's
                         byte fallback)

`tokenizers.decoders.DecodeStream` (0.23) replaces neither: bytes that never become text are never
shown, not even at the end, and all of them are decoded again with each token (500 µs per token
after 1,500 of them; a window takes 8).
"""

import codecs
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

#: Stands for bytes that are not text.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes. What is not text after this many tokens will not become text.
_MAX_PENDING_TOKENS = 8

# Decoded at once, where there are so many.
_GROUP_TOKENS = 64

# Any one that is a byte in UTF-8.
_LETTER = "A"

# Of `codecs`: each byte that is no text is replaced, where Python replaces several by one.
_ONE_PER_BYTE = "tandem_one_per_byte"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "bytes are decoded"
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_ONE_PER_BYTE, _replace_each)


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

    For vocabularies whose decoder looks at neighbours (SentencePiece's leading space). The window
    is `context + pending`: the text of the context has been returned, that of the pending tokens
    has not. The text ends in U+FFFD while a character is incomplete.

    The text is the same however the tokens are divided.
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


class FallbackDetokenizer:
    """Decodes tokens of single bytes itself, and has another detokenizer do so with all others.

    As SentencePiece does, each byte that is part of no character becomes one U+FFFD, and leaves the
    characters beside it alone. (The library's decoder spoils the whole run of bytes.)
    """

    def __init__(self, others: Detokenizer, byte_of: Mapping[int, int]) -> None:
        """Args:
        others: a new one.
        byte_of: the byte of each such token; each byte has one.
        """
        self._others = others
        self._byte_of = byte_of
        self._letter_id = next(token_id for token_id, b in byte_of.items() if b == ord(_LETTER))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=_ONE_PER_BYTE)
        # Whether the last token was a byte.
        self._is_in_bytes = False

    def feed(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for is_bytes, group in itertools.groupby(token_ids, self._byte_of.__contains__):
            if not is_bytes:
                parts += (self._end_bytes(), self._others.feed(list(group)))
                continue
            if not self._is_in_bytes:
                # What follows the bytes is no first word: the others get a letter in their place.
                parts.append(self._others.feed((self._letter_id,)).removesuffix(_LETTER))
            self._is_in_bytes = True
            parts.append(self._decoder.decode(bytes(map(self._byte_of.__getitem__, group))))
        return "".join(parts)

    def finish(self) -> str:
        return self._end_bytes() + self._others.finish()

    def copy(self) -> "FallbackDetokenizer":
        copy = FallbackDetokenizer(self._others.copy(), self._byte_of)
        copy._decoder.setstate(self._decoder.getstate())
        copy._is_in_bytes = self._is_in_bytes
        return copy

    def _end_bytes(self) -> str:
        """The text of the last bytes, where no other follows that completes a character."""
        self._is_in_bytes = False
        return self._decoder.decode(b"", final=True)
