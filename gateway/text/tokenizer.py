"""The tokenizer of the model's folder.

Owns encoding, decoding and what is known of the vocabulary. Read-only once loaded.
"""

import functools
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from gateway.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)

# The library would start threads for its first call, though every call has one text. Where none can
# be started at that moment, all calls fail until the process ends.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

#: The text of an output depends on so many tokens before it, for decoders that look at neighbours:
#: more than one, since special tokens have no text.
CONTEXT_TOKENS = 64

# A text of more bytes per allowed token than most texts have per token, or of more than so many
# bytes in all, is counted piece by piece before it is encoded: the library takes up to 400 bytes
# for each byte that it is given.
_UNCOUNTED_BYTES_PER_TOKEN = 8
_MAX_UNCOUNTED_BYTES = 1 << 19
_PIECE_CHARACTERS = 1 << 16

# How many tokens more a piece may have than its part of the whole text: a word that is cut in two
# may be known only as a whole, or be one unknown token because it is long.
_MAX_TOKENS_BY_CUT = 256

# NFC composition leaves at least one byte of four: found by trying all characters.
_MAX_NFC_SHRINKAGE = 4

# What SentencePiece writes for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TooManyTokensError(Exception):
    """A text has more tokens than allowed.

    Args:
        num_tokens: how many it has.
        is_exact: otherwise it has as many at least.
    """

    def __init__(self, num_tokens: int, *, is_exact: bool = True) -> None:
        super().__init__(f"the text has {num_tokens}{'' if is_exact else ' or more'} tokens")
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class TokenizerLoadError(Exception):
    """A folder has no usable tokenizer.

    Args:
        path: the file that was tried.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class Tokenizer:
    """A tokenizer of the `tokenizers` package; any thread may encode.

    Attributes:
        digest: SHA-256 of its `tokenizer.json`, as verifiers report it; "" if it has no file.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, digest: str = "") -> None:
        self.digest = digest
        # Settings that a training run left in the file must not cut prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = {
            token_id: token.content for token_id, token in added.items() if token.special
        }
        self._added = frozenset(token.content for token in added.values())
        self._is_byte_level = _is_byte_level(tokenizer)
        # Of byte fallback.
        self._byte_of = {
            token_id: byte
            for byte in range(0x100)
            if (token_id := tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None
        }
        self._has_fallback = len(self._byte_of) == 0x100 and "ByteFallback" in json.dumps(
            _state(tokenizer.decoder)
        )
        self._bytes_of: dict[int, bytes] = {}  # at most one entry per id of the vocabulary
        self._max_bytes_per_token = _max_bytes_per_token(tokenizer) if self._is_byte_level else None

    @classmethod
    def load(cls, folder: Path, *, shown: Collection[str] = ()) -> "Tokenizer":
        """Loads `tokenizer.json` of a model's folder.

        Args:
            shown: tokens that have a text, even if the file says that they are special.

        Raises:
            TokenizerLoadError: the file is missing, or not a tokenizer.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerLoadError(path, "no such file")
        try:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if shown:
                content = _without_special(content, shown)
            return cls(tokenizers.Tokenizer.from_buffer(content), digest=digest)
        except Exception as error:  # the package raises nothing more precise
            raise TokenizerLoadError(path, f"not a tokenizer: {error}") from error

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt: special tokens in it are recognised, none are added.

        The batch call, unlike the single one, releases the GIL, so a thread may encode a long text
        while the event loop runs.

        Raises:
            TooManyTokensError: there are more than `max_tokens`; no list was made of them. Of a
                text that is much too long, no more than a part was encoded.
        """
        if max_tokens is not None:
            self._check_pieces(text, max_tokens)
        encoding = self._encode(text)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding))
        return encoding.ids

    def is_added_token(self, text: str) -> bool:
        """Whether the text is a token that was added to the vocabulary, special or not."""
        return text in self._added

    def max_bytes(self, num_tokens: int) -> int | None:
        """The most bytes of UTF-8 that any text of `num_tokens` tokens can have.

        None where there is no such bound: a tokenizer that drops spaces, or makes one token of
        every unknown run, may make few tokens of a long text.
        """
        max_bytes = self._max_bytes_per_token
        return None if max_bytes is None else num_tokens * max_bytes

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer for one output.

        Args:
            context: the tokens before the output. Their text is not returned, but the output's
                depends on it: a first word keeps its space, and a character that the context
                leaves incomplete is completed.
        """
        detokenizer: Detokenizer
        if self._is_byte_level:
            detokenizer = ByteDetokenizer(self.bytes_of)
        else:
            detokenizer = WindowDetokenizer(self._decode)
            if self._has_fallback:
                detokenizer = FallbackDetokenizer(detokenizer, self._byte_of)
        detokenizer.feed(context[-CONTEXT_TOKENS:])
        return detokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole output; special tokens and unknown ids are left out."""
        detokenizer = self.detokenizer()
        return detokenizer.feed(token_ids) + detokenizer.finish()

    def _decode(self, token_ids: Sequence[int]) -> str:
        # The library recognises special tokens by their text, and not where it normalises that.
        shown = [token_id for token_id in token_ids if token_id not in self._special_texts]
        return self._tokenizer.decode(shown, skip_special_tokens=True)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; none if it is special."""
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = self._find_bytes(token_id)
        return found

    def special_text(self, token_id: int) -> str:
        """How a special token is written; "" of any other."""
        return self._special_texts.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for by itself, special ones included; none if unknown."""
        special = self.special_text(token_id)
        if special:
            return special.encode()
        if self._is_byte_level:
            return self.bytes_of(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_of:
            return bytes((self._byte_of[token_id],))
        return token.replace(_SPACE, " ").encode()

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Refuses a long text that has far too many tokens, with the memory of one piece."""
        num_bytes = min(max_tokens * _UNCOUNTED_BYTES_PER_TOKEN, _MAX_UNCOUNTED_BYTES)
        if len(text.encode()) <= num_bytes:
            return
        num_tokens = 0
        for first in range(0, len(text), _PIECE_CHARACTERS):
            piece = self._encode(text[first : first + _PIECE_CHARACTERS])
            num_tokens += max(0, len(piece) - _MAX_TOKENS_BY_CUT)
            if num_tokens > max_tokens:
                raise TooManyTokensError(num_tokens, is_exact=False)

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._special_texts:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in token)
        except KeyError:
            return token.encode()  # an added token stands for itself


def _without_special(content: bytes, shown: Collection[str]) -> bytes:
    """The file's content, where none of these tokens is special."""
    file = json.loads(content)
    for token in file.get("added_tokens", ()):
        token["special"] = token.get("special", False) and token["content"] not in shown
    return json.dumps(file).encode()


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the text of tokens is that of their bytes, one after another, and nothing else."""
    decoder = _state(tokenizer.decoder) or {}
    first, *others = decoder.get("decoders") or [decoder]
    return first.get("type") == "ByteLevel" and all(each["type"] == "Fuse" for each in others)


def _max_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
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
    return max(lengths) * (1 if normalizer is None else _MAX_NFC_SHRINKAGE)


def _state(part: Any) -> dict[str, Any] | None:
    """The configuration of a part of a tokenizer, as in `tokenizer.json`."""
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
