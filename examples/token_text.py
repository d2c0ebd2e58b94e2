"""The text of single tokens, to show which part of an output was drafted.

A gateway sends the text of a chunk as a whole. The examples also need to know where a token ends in
it, so they use the model's tokenizer themselves.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer


class TokenText:
    """Turns one output's tokens into text, piece by piece; the pieces join to the whole."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._token_ids: list[int] = []
        self._text = ""

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add: whole characters only, nothing for special tokens."""
        self._token_ids.extend(token_ids)
        text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece, self._text = text[len(self._text) :], text
        return piece
