"""From a choice's events to the parts of an answer.

Owns what each choice needs to remember between two chunks: where its next token's text begins, and
the prompt that it echoes.
"""

import dataclasses
import secrets
from collections.abc import Sequence

from gateway.api.openai.answers import Part, ToolCallDelta
from gateway.api.openai.report import SpeculationReport
from gateway.api.openai.tokens import TextOffsets, TokenTexts
from gateway.messages.response import Chunk, EncodedLogprob, EncodedStep
from gateway.text.reasoning import ReasoningReader
from gateway.text.tool_call_reader import CallDelta
from gateway.text.tool_calls import ToolCallParser

# Read at once where the end of reasoning is looked for: a chunk may hold very many.
_GROUP_TOKENS = 64

# Of a prompt's last tokens, in which a tag that begins reasoning would be.
_PROMPT_END_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What the parts of an answer hold beside the text.

    Attributes:
        report: of the drafts.
        parts: token by token; needs logprobs, and chunks that tell the text of each token.
    """

    logprobs: bool
    token_ids: bool
    report: bool
    parts: bool = False


class Choice:
    """What the choices of both APIs have in common.

    Attributes:
        wants: what its parts hold beside the text.
    """

    def __init__(self, wants: Wants) -> None:
        self.wants = wants
        self._texts = TokenTexts(None)
        self._report: SpeculationReport | None = None

    @property
    def echoes_tokens(self) -> bool:
        """Whether its text begins with the prompt, which was not given as text."""
        return False

    def start(self, texts: TokenTexts, prompt_token_ids: Sequence[int], decoded: str) -> None:
        """Begins, before its first part.

        Args:
            texts: of the model's tokens.
            prompt_token_ids: the prompt's.
            decoded: the prompt's text, if it `echoes_tokens`.
        """
        self._texts = texts
        if self.wants.report:
            self._report = SpeculationReport(texts.detokenizer(prompt_token_ids))

    def add_trace(self, step: EncodedStep) -> None:
        """The trace of the step whose tokens come next."""
        if self._report is not None:
            self._report.add_trace(step)

    def read(self, chunk: Chunk) -> Part:
        """The next part."""
        raise NotImplementedError

    def finish(self) -> Part:
        """What was held back; after the last chunk."""
        return Part("", None, None)

    @property
    def has_calls(self) -> bool:
        """Whether any part had tool calls."""
        return False

    def _part(self, text: str, logprobs: list[object] | None, chunk: Chunk) -> Part:
        return Part(
            text,
            logprobs,
            list(chunk.token_ids) if self.wants.token_ids else None,
            "" if self._report is None else self._report.read(chunk),
        )


class ChatChoice(Choice):
    """One choice of a chat completion."""

    def __init__(
        self,
        wants: Wants,
        *,
        parser: ToolCallParser | None,
        has_one_call: bool,
        reads_reasoning: bool,
    ) -> None:
        """Args:
        wants: what its parts hold beside the text.
        parser: of its own; None: tool calls stay text.
        has_one_call: whether calls after the first are left out.
        reads_reasoning: whether reasoning is told from the answer.
        """
        super().__init__(wants)
        self._parser = parser
        self._has_one_call = has_one_call
        self._num_calls = 0
        self._reads_reasoning = reads_reasoning
        self._reasoning: ReasoningReader | None = None
        # Tokens of which it is not known yet whether they are of reasoning.
        self._num_undecided = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def start(self, texts: TokenTexts, prompt_token_ids: Sequence[int], decoded: str) -> None:
        super().start(texts, prompt_token_ids, decoded)
        if self._reads_reasoning:
            self._reasoning = ReasoningReader(texts.echo(prompt_token_ids[-_PROMPT_END_TOKENS:]))

    def read(self, chunk: Chunk) -> Part:
        logprobs: list[object] | None = None
        if self.wants.logprobs:
            logprobs = [self._texts.chat_logprob(each) for each in chunk.logprobs]
        part = self._part(chunk.text, logprobs, chunk)
        if not self.wants.parts:
            return self._told_apart(part, chunk.token_ids)
        assert logprobs is not None, "wanted, too"
        texts = [text for step in chunk.steps for text in step.token_texts]
        parts = [
            self._told_apart(Part(text, [logprob], None), [token_id])
            for text, logprob, token_id in zip(texts, logprobs, chunk.token_ids, strict=True)
        ]
        num_reasoning_tokens = sum(each.num_reasoning_tokens for each in parts)
        return part._replace(num_reasoning_tokens=num_reasoning_tokens, parts=parts)

    def finish(self) -> Part:
        part = super().finish()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
            part = part._replace(text=text, reasoning=reasoning)
        if self._parser is None:
            return part
        fed, rest = self._parser.feed(part.text), self._parser.finish()
        return self._shown(part, [*fed.pieces, *rest.pieces])

    def _told_apart(self, part: Part, token_ids: Sequence[int]) -> Part:
        """The part, with reasoning, text and calls told from each other."""
        if self._reasoning is not None and not self._reasoning.is_answer:
            part = self._read_reasoning(self._reasoning, part, token_ids)
        if self._parser is None:
            return part
        part = part._replace(begins_in_call=self._parser.is_in_call)
        return self._shown(part, self._parser.feed(part.text).pieces)

    def _read_reasoning(
        self, reader: ReasoningReader, part: Part, token_ids: Sequence[int]
    ) -> Part:
        """The part, with reasoning and answer told from each other."""
        was_over, before = reader.is_over, reader.copy()
        reasoning, text = reader.feed(part.text)
        num_tokens = 0
        if not was_over:
            self._num_undecided += len(token_ids)
            if reader.is_over:
                self._num_undecided -= len(token_ids) - self._num_up_to_end(before, token_ids)
            if reader.has_begun:
                num_tokens, self._num_undecided = self._num_undecided, 0
        return part._replace(text=text, reasoning=reasoning, num_reasoning_tokens=num_tokens)

    def _num_up_to_end(self, reader: ReasoningReader, token_ids: Sequence[int]) -> int:
        """How many of a chunk's tokens come up to the end of the reasoning.

        Args:
            reader: as it was before the chunk.
        """
        # What a character lacks that an earlier chunk began belongs to no tag.
        detokenizer = self._texts.detokenizer(())
        assert detokenizer is not None, "a text was read"
        num_tokens = 0
        for size in (_GROUP_TOKENS, 1):
            while num_tokens < len(token_ids):
                tried, tried_detokenizer = reader.copy(), detokenizer.copy()
                tried.feed(tried_detokenizer.feed(token_ids[num_tokens : num_tokens + size]))
                if tried.is_over:
                    break
                reader, detokenizer = tried, tried_detokenizer
                num_tokens += size
        return min(num_tokens + 1, len(token_ids))

    def _shown(self, part: Part, pieces: Sequence[str | CallDelta]) -> Part:
        texts: list[str] = []
        num_characters = 0
        deltas = []
        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
                num_characters += len(piece)
                continue
            name, arguments = piece
            begins = name is not None
            self._num_calls += begins
            if self._has_one_call and self._num_calls > 1:
                continue
            call_id = f"call_{secrets.token_hex(12)}" if begins else None
            position = self._num_calls - 1
            deltas.append(ToolCallDelta(position, call_id, name, arguments, num_characters))
        return part._replace(text="".join(texts), tool_calls=deltas)


class CompletionChoice(Choice):
    """One choice of a completion."""

    def __init__(self, wants: Wants, *, echoes: bool, prompt: str | None) -> None:
        """Args:
        wants: what its parts hold beside the text.
        echoes: whether its text begins with the prompt.
        prompt: the text to begin with; None: that of the prompt's tokens.
        """
        super().__init__(wants)
        self._echo = prompt if echoes else ""
        self._echo_length = 0
        # A text that was given shows special tokens; one that was decoded does not.
        self._echoes_special = prompt is not None
        self._prompt_token_ids: Sequence[int] = ()
        self._num_scored = 0
        self._prompt_offsets = TextOffsets(None)
        self._offsets = TextOffsets(None)

    @property
    def echoes_tokens(self) -> bool:
        return self._echo is None

    def start(self, texts: TokenTexts, prompt_token_ids: Sequence[int], decoded: str) -> None:
        super().start(texts, prompt_token_ids, decoded)
        if self._echo is None:
            self._echo = decoded
        self._echo_length = len(self._echo)
        if self.wants.logprobs:
            self._prompt_token_ids = prompt_token_ids
            self._prompt_offsets = TextOffsets(texts.detokenizer(()))
            # The text of the prompt's tokens may be longer or shorter than the echo: tokenizers
            # compose characters, drop spaces.
            self._offsets = TextOffsets(texts.detokenizer(prompt_token_ids), self._echo_length)

    def read(self, chunk: Chunk) -> Part:
        text, self._echo = (self._echo or "") + chunk.text, ""
        if not self.wants.logprobs:
            return self._part(text, None, chunk)
        logprobs = self._prompt_logprobs(chunk.prompt_logprobs)
        offsets = self._offsets.next(chunk.token_ids)
        logprobs += map(self._texts.completion_logprob, chunk.logprobs, offsets)
        return self._part(text, logprobs, chunk)

    def _prompt_logprobs(self, encoded: Sequence[EncodedLogprob]) -> list[object]:
        first = self._num_scored
        self._num_scored += len(encoded)
        token_ids = self._prompt_token_ids[first : self._num_scored]
        special_text = self._texts.special_text if self._echoes_special else lambda _: ""
        offsets = self._prompt_offsets.next(token_ids, special_text)
        return [
            self._texts.completion_logprob(each, min(offset, self._echo_length))
            if each
            else self._texts.first_prompt_logprob(token_id)
            for token_id, each, offset in zip(token_ids, encoded, offsets, strict=True)
        ]
