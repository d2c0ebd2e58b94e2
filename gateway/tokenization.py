"""Text to token ids and back, with the tokenizer of the model's folder.

Owns the tokenizer and how text is made certain token by token. Knows no request.

    Tokenizer            encode; make detokenizers
    ByteDetokenizer      for byte-level vocabularies: every token is a string of bytes
    WindowDetokenizer    for all others: decode a short window again and again
"""

import codecs
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders

#: What stands for bytes that are not text.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character is at most 4 bytes. What is still not text after this many tokens will not become it.
_MAX_PENDING_TOKENS = 8


class TokenizerLoadError(Exception):
    """A folder has no tokenizer that can be used.

    Args:
        path: the file that was tried.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class Detokenizer(Protocol):
    """The text of one output as its tokens come. Special tokens are left out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that became certain with them."""

    def finish(self) -> str:
        """The output is over: returns what was held back of an incomplete character."""


class Tokenizer:
    """A tokenizer of the `tokenizers` package. Read-only after loading; any thread may encode."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # What a training run left in the file must not cut prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}  # at most one entry per id of the vocabulary

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Loads `tokenizer.json` of a model's folder.

        Raises:
            TokenizerLoadError: it is not there, or not a tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerLoadError(path, "no such file")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the package raises nothing more precise
            raise TokenizerLoadError(path, f"not a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens in it are recognised, none are added.

        The batch call, unlike the single one, releases the GIL, so a long text may be encoded in
        a thread while the event loop goes on.
        """
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer for one output."""
        if self._is_byte_level:
            return ByteDetokenizer(self)
        return WindowDetokenizer(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output; special tokens and unknown ids are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level vocabulary stands for; none if special."""
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in token)
        except KeyError:
            return token.encode()  # an added token stands for itself


class ByteDetokenizer:
    """Joins the tokens' bytes and decodes them as they become whole characters.

    Constant work per token, and the same text as decoding everything at once: both put one
    U+FFFD for each maximal part of an ill-formed sequence (Unicode 15, section 3.9).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the last tokens together with some that went before them.

    For vocabularies whose decoder looks at neighbours (SentencePiece's leading space, byte
    fallback). The window is `context + pending`: the text of the context has been returned, that
    of the pending tokens has not. The text ends in U+FFFD while a character is incomplete.

    The text equals that of decoding everything at once except inside runs of byte-fallback tokens
    that are not valid UTF-8: there the whole run decides, and a stream cannot wait for its end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._num_context = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            self._window.append(token_id)
            parts.append(self._advance(final=False))
        return "".join(parts)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        context_text = self._decode(self._window[: self._num_context])
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        is_whole = len(text) > len(context_text) and not text.endswith(REPLACEMENT)
        if not (is_whole or final or num_pending > _MAX_PENDING_TOKENS):
            return ""
        # The pending tokens become the context, and the old context is done with.
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text[len(context_text) :]


@functools.cache
def _byte_of_character() -> dict[str, int]:
    # GPT-2's reversible table: printable bytes stand for themselves, the others for the
    # characters from U+0100 on (https://github.com/openai/gpt-2, encoder.py).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
