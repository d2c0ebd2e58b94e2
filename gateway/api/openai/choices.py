"""From a choice's events to the parts of an answer.

Owns what each choice needs to remember between two chunks: where its next token's text begins, and
the prompt that it echoes.
"""

from collections.abc import Sequence

from gateway.api.openai.answers import Part
from gateway.api.openai.tokens import TextOffsets, TokenTexts
from gateway.messages.response import Chunk, EncodedLogprob


class ChatChoice:
    """One choice of a chat completion."""

    def __init__(
        self, texts: TokenTexts, *, wants_logprobs: bool, wants_token_ids: bool = False
    ) -> None:
        self._texts = texts
        self._wants_logprobs = wants_logprobs
        self._wants_token_ids = wants_token_ids

    def read(self, chunk: Chunk) -> Part:
        """The next part."""
        return Part(
            chunk.text,
            [self._texts.chat_logprob(each) for each in chunk.logprobs]
            if self._wants_logprobs
            else None,
            list(chunk.token_ids) if self._wants_token_ids else None,
        )


class CompletionChoice:
    """One choice of a completion."""

    def __init__(
        self,
        texts: TokenTexts,
        *,
        echo: str,
        echoes_special: bool,
        prompt_token_ids: Sequence[int],
        offsets: TextOffsets | None,
        wants_token_ids: bool,
    ) -> None:
        """Args:
        texts: of the model's tokens.
        echo: the text before the output.
        echoes_special: whether that text shows special tokens.
        prompt_token_ids: those of `echo`, if logprobs are shown.
        offsets: None: no logprobs.
        wants_token_ids: whether parts hold them.
        """
        self._texts = texts
        self._echo = echo
        self._special_text = texts.special_text if echoes_special else lambda _: ""
        self._prompt_token_ids = prompt_token_ids
        self._num_scored = 0
        self._offsets = offsets
        self._wants_token_ids = wants_token_ids

    def read(self, chunk: Chunk) -> Part:
        """The next part."""
        text, self._echo = self._echo + chunk.text, ""
        token_ids = list(chunk.token_ids) if self._wants_token_ids else None
        if self._offsets is None:
            return Part(text, None, token_ids)
        logprobs = self._prompt_logprobs(chunk.prompt_logprobs, self._offsets)
        offsets = self._offsets.next(chunk.token_ids)
        logprobs += map(self._texts.completion_logprob, chunk.logprobs, offsets)
        return Part(text, logprobs, token_ids)

    def _prompt_logprobs(
        self, encoded: Sequence[EncodedLogprob], offsets: TextOffsets
    ) -> list[object]:
        first = self._num_scored
        self._num_scored += len(encoded)
        token_ids = self._prompt_token_ids[first : self._num_scored]
        return [
            self._texts.completion_logprob(each, offset)
            if each
            else self._texts.first_prompt_logprob(token_id)
            for token_id, each, offset in zip(
                token_ids, encoded, offsets.next(token_ids, self._special_text), strict=True
            )
        ]


Choice = ChatChoice | CompletionChoice
