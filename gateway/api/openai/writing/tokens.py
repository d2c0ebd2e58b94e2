"""Logprobs in OpenAI's two forms, with the text and the bytes of each token.

Owns how a single token is shown. The text of an output is the tokenizer's matter: it joins tokens,
while here each stands alone, so that one may hold a part of a character.
"""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gateway.api import wire
from gateway.messages.response import EncodedLogprob
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tandem.values import TokenLogprob

# JSON has no infinity; OpenAI's API writes the first of these for impossible tokens.
_MIN_LOGPROB, _MAX_LOGPROB = -9999.0, 9999.0

_CACHED_TOKENS = 1 << 16


class CompletionLogprob(NamedTuple):
    """One token's entries in the four lists of completions' logprobs, as JSON."""

    token: str
    logprob: str
    top: str
    offset: str


class TokenTexts:
    """The texts of single tokens, as JSON."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Args:
        tokenizer: None: tokens have no text, and are shown as `token_id:` and their number.
        """
        self._tokenizer = tokenizer
        # On the instance: it keeps no other alive.
        self._shown = functools.lru_cache(_CACHED_TOKENS)(self._show)

    def detokenizer(self, context: Sequence[int]) -> Detokenizer | None:
        """A new detokenizer for one output, after some tokens; None: tokens have no text."""
        return None if self._tokenizer is None else self._tokenizer.detokenizer(context)

    def echo(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, without special tokens. A character that it leaves incomplete is
        the output's.
        """
        detokenizer = self.detokenizer(())
        return "" if detokenizer is None else detokenizer.feed(token_ids)

    def text(self, token_id: int) -> str:
        """The token's text, quoted; `bytes:` and its bytes, if they are no whole characters."""
        return self._shown(token_id)[0]

    def special_text(self, token_id: int) -> str:
        """The text of a special token; "" of any other."""
        return "" if self._tokenizer is None else self._tokenizer.special_text(token_id)

    def chat_logprob(self, encoded: EncodedLogprob) -> str:
        """An element of the `content` of chat completions' logprobs."""
        logprob = wire.logprob_from_encoded(encoded)
        top = ",".join([self._chat_entry(each) + "}" for each in logprob.top])
        return f'{self._chat_entry(logprob)},"top_logprobs":[{top}]}}'

    def completion_logprob(self, encoded: EncodedLogprob, offset: int) -> CompletionLogprob:
        """The entries of one token.

        Args:
            encoded: its logprob.
            offset: where its text begins, in characters.
        """
        logprob = wire.logprob_from_encoded(encoded)
        # Several tokens may have one text: the token itself counts, then the likeliest. It may be
        # none of these.
        shown: dict[str, float] = {}
        for each in logprob.top:
            shown.setdefault(self.text(each.token_id), each.logprob)
        shown[self.text(logprob.token_id)] = logprob.logprob
        top = ",".join([f"{text}:{_number(value)}" for text, value in shown.items()])
        return CompletionLogprob(
            token=self.text(logprob.token_id),
            logprob=_number(logprob.logprob),
            top=f"{{{top}}}",
            offset=str(offset),
        )

    def first_prompt_logprob(self, token_id: int) -> CompletionLogprob:
        """The entries of a prompt's first token, which has no logprob."""
        return CompletionLogprob(self.text(token_id), "null", "null", "0")

    def _chat_entry(self, entry: TokenLogprob) -> str:
        text, token_bytes = self._shown(entry.token_id)
        return f'{{"token":{text},"bytes":{token_bytes},"logprob":{_number(entry.logprob)}'

    def _show(self, token_id: int) -> tuple[str, str]:
        """The token's text, and the list of its bytes."""
        if self._tokenizer is None:
            return f'"token_id:{token_id}"', "null"
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            text = token_bytes.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        return json.dumps(text), json.dumps(list(token_bytes), separators=(",", ":"))


class TextOffsets:
    """Where the text of each token begins in a choice's text, in characters."""

    def __init__(self, detokenizer: Detokenizer | None, start: int = 0) -> None:
        """Args:
        detokenizer: of its own; it has been fed what comes before the tokens.
        start: where the text of the first of them begins.
        """
        self._detokenizer = detokenizer
        self._offset = start

    def next(
        self, token_ids: Iterable[int], special_text: Callable[[int], str] = lambda _: ""
    ) -> list[int]:
        """The offsets of the next tokens; of one within a character, the character's.

        Args:
            special_text: what the text shows of a token that detokenizers leave out.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                text = self._detokenizer.feed((token_id,))
                self._offset += len(text or special_text(token_id))
        return offsets


def _number(logprob: float) -> str:
    # Of a number and a NaN, `max` gives the first; JSON has no NaN.
    return repr(min(max(_MIN_LOGPROB, logprob), _MAX_LOGPROB))
