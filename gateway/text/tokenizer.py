"""Text to token ids and back, with the tokenizer of the model's folder.

Owns the tokenizer and how text is made certain token by token. Knows no request.

    Tokenizer            encode; make detokenizers
    ByteDetokenizer      for byte-level vocabularies: every token is a string of bytes
    WindowDetokenizer    for all others: decode a short window again and again
"""

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders

#: What stands for bytes that are not text.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character is at most 4 bytes. What is still not text after this many tokens will not become it.
_MAX_PENDING_TOKENS = 8

# So many tokens are decoded at once, where so many are there.
_GROUP_TOKENS = 64

#: So many tokens before an output say where its text goes on, for decoders that look at neighbours:
#: more than one, since special tokens have no text.
CONTEXT_TOKENS = 64

# Composing characters (NFC) leaves at least one byte of four: found by trying all characters.
_MOST_NFC_SHRINKAGE = 4


class TooManyTokensError(Exception):
    """A text has more tokens than are wanted of it.

    Args:
        num_tokens: as many as it has.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens")
        self.num_tokens = num_tokens


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

    def copy(self) -> "Detokenizer":
        """Another one that goes on from here."""


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
        self._most_bytes_per_token = (
            _most_bytes_per_token(tokenizer) if self._is_byte_level else None
        )

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

    def encode(self, text: str, *, most_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt: special tokens in it are recognised, none are added.

        The batch call, unlike the single one, releases the GIL, so a long text may be encoded in
        a thread while the event loop goes on.

        Raises:
            TooManyTokensError: they are more than wanted; no list was made of them.
        """
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        if most_tokens is not None and len(encoding) > most_tokens:
            raise TooManyTokensError(len(encoding))
        return encoding.ids

    def most_bytes(self, num_tokens: int) -> int | None:
        """A text of more bytes has more tokens than that, whatever it says.

        None where there is no such bound: a tokenizer that drops spaces, or makes one token of
        everything that it does not know, may make little of a long text.
        """
        most = self._most_bytes_per_token
        return None if most is None else num_tokens * most

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer for one output.

        Args:
            context: what goes before the output, whose text was shown elsewhere. The output's text
                is what comes on top of it: a first word keeps its space, and a character that the
                context leaves incomplete is completed.
        """
        detokenizer = ByteDetokenizer(self) if self._is_byte_level else WindowDetokenizer(self)
        detokenizer.feed(context[-CONTEXT_TOKENS:])
        return detokenizer

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
        self._tokenizer = tokenizer
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def copy(self) -> "ByteDetokenizer":
        copy = ByteDetokenizer(self._tokenizer)
        copy._decoder.setstate(self._decoder.getstate())
        return copy


class WindowDetokenizer:
    """Decodes the last tokens together with some that went before them.

    For vocabularies whose decoder looks at neighbours (SentencePiece's leading space, byte
    fallback). The window is `context + pending`: the text of the context has been returned, that
    of the pending tokens has not. The text ends in U+FFFD while a character is incomplete.

    The text equals that of decoding everything at once except inside runs of byte-fallback tokens
    that are not valid UTF-8: there the whole run decides, and a stream cannot wait for its end.

    `tokenizers.decoders.DecodeStream` is not used in its place: of bytes that never become text it
    shows nothing and keeps all, so that each of them costs more than the one before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._num_context = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        parts = []
        for first in range(0, len(token_ids), _GROUP_TOKENS):
            group = token_ids[first : first + _GROUP_TOKENS]
            if len(group) > 1:
                before = len(self._window)
                self._window += group
                text = self._advance(most_pending=len(self._window))
                if text:
                    parts.append(text)
                    continue
                # It ends within a character, or has no text: one by one, then.
                del self._window[before:]
            for token_id in group:
                self._window.append(token_id)
                parts.append(self._advance(most_pending=_MAX_PENDING_TOKENS))
        return "".join(parts)

    def finish(self) -> str:
        return self._advance(most_pending=0)

    def copy(self) -> "WindowDetokenizer":
        copy = WindowDetokenizer(self._tokenizer)
        copy._window = self._window.copy()
        copy._num_context = self._num_context
        return copy

    def _advance(self, *, most_pending: int) -> str:
        context_text = self._decode(self._window[: self._num_context])
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_context
        is_whole = len(text) > len(context_text) and not text.endswith(REPLACEMENT)
        if not (is_whole or num_pending > most_pending):
            return ""
        if len(text) <= len(context_text):
            # What has no text is no context: behind it, a word would lose its space.
            del self._window[self._num_context :]
            return ""
        # The pending tokens become the context, and the old context is done with.
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        return text[len(context_text) :]


def _most_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Of a byte-level vocabulary; None if a text may have bytes that are in none of its tokens."""
    normalizer, pre_tokenizer = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if any(
        step["type"] not in ("ByteLevel", "Digits", "Split") or step.get("behavior") == "Removed"
        for step in steps
    ):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if any(character not in vocabulary for character in _byte_of_character()):
        return None
    lengths = [len(token) for token in vocabulary]
    lengths += [len(token.content.encode()) for token in added]
    return max(lengths) * (1 if normalizer is None else _MOST_NFC_SHRINKAGE)


def _state(part: Any) -> dict[str, Any] | None:
    """What a part of a tokenizer is made of, as in `tokenizer.json`."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


@functools.cache
def _byte_of_character() -> dict[str, int]:
    # GPT-2's reversible table: printable bytes stand for themselves, the others for the
    # characters from U+0100 on (https://github.com/openai/gpt-2, encoder.py).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
