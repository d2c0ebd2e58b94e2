"""The model's tokenizer as grammars use it."""

import functools
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from verifier.structured.library_grammar import LIMITS
from verifier.structured.library_tokenizer import library_tokenizer

# What texts that must come may begin with: how many answers are kept, and of how long a text. Most
# texts are short and come again.
_MAX_BEGINNINGS = 4096
_MAX_TEXT_BYTES = 64


class GrammarTokenizer:
    """The library's, which can be used.

    Attributes:
        end_token_ids: what may follow when a grammar's text is complete.
    """

    def __init__(self, tokenizer: LLTokenizer, end_token_ids: frozenset[int]) -> None:
        self.end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._begins = functools.lru_cache(_MAX_BEGINNINGS)(self._compute_begins)

    def matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

    def may_begin(self, text: bytes, token_id: int) -> bool:
        """See `GrammarState`. For any thread.

        True: the tokenizer begins the text with the token, and writes the rest, taken alone, as in
        the whole text; or the token is longer than the text, and the library forces no token of a
        text where an allowed one goes on after it.
        """
        return len(text) <= _MAX_TEXT_BYTES and self._begins(text, token_id)

    def _compute_begins(self, text: bytes, token_id: int) -> bool:
        token = self._tokenizer.decode_bytes([token_id])
        if len(token) > len(text):
            return _is_text(text)
        rest = text[len(token) :]
        if not (_is_text(text) and _is_text(rest)):
            # A part of a character, or a special token: matchers write such a text otherwise.
            return False
        token_ids: list[int] = self._tokenizer.tokenize_bytes(text)
        return token_ids == [token_id, *self._tokenizer.tokenize_bytes(rest)]


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_tokenizer(
    path: Path, vocab_size: int, end_token_ids: Sequence[int]
) -> GrammarTokenizer | None:
    """None if the library cannot use it."""
    # A model may name end tokens that have no logit.
    end_token_ids = [each for each in end_token_ids if each < vocab_size]
    try:
        text, _ = library_tokenizer(path.read_text(encoding="utf-8"))
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_token_ids)
        return GrammarTokenizer(tokenizer, frozenset(end_token_ids))
    except BaseException:  # also what the library panics with
        return None
