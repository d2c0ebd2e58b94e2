"""From a choice's events to the parts of an answer.

Owns what each choice needs to remember between two chunks: where its next token's text begins, and
the prompt that it echoes.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Sequence

from gateway.api.openai.writing.answers import Part, ToolCallDelta
from gateway.api.openai.writing.report import SpeculationReport
from gateway.api.openai.writing.tokens import TextOffsets, TokenTexts
from gateway.messages.response import Chunk, EncodedLogprob, EncodedStep
from gateway.text.output.parts import Read, ReasoningText
from gateway.text.output.tool_call_reader import CallDelta


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

    def __init__(self, wants: Wants, *, has_one_call: bool) -> None:
        """Args:
        wants: what its parts hold beside the text.
        has_one_call: whether calls after the first are left out.
        """
        super().__init__(wants)
        self._has_one_call = has_one_call
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def read(self, chunk: Chunk) -> Part:
        logprobs: list[object] | None = None
        if self.wants.logprobs:
            logprobs = [self._texts.chat_logprob(each) for each in chunk.logprobs]
        part = self._part("", logprobs, chunk)
        reads = [read for step in chunk.steps for read in step.reads]
        if not self.wants.parts:
            return self._told_apart(part, reads)
        assert logprobs is not None, "wanted, too"
        parts = [
            self._told_apart(Part("", [logprob], None), [read])
            for logprob, read in zip(logprobs, reads, strict=False)
        ]
        # What was held back to the end has no token.
        parts += [self._told_apart(Part("", [], None), [read]) for read in reads[len(logprobs) :]]
        num_reasoning_tokens = sum(each.num_reasoning_tokens for each in parts)
        return part._replace(num_reasoning_tokens=num_reasoning_tokens, parts=parts)

    def _told_apart(self, part: Part, reads: Sequence[Read]) -> Part:
        """The part, with what was read in it."""
        reasoning: list[str] = []
        texts: list[str] = []
        deltas: list[ToolCallDelta] = []
        num_characters = 0
        for piece in itertools.chain.from_iterable([read.pieces for read in reads]):
            match piece:
                case str():
                    texts.append(piece)
                    num_characters += len(piece)
                case ReasoningText(text):
                    reasoning.append(text)
                case CallDelta():
                    deltas += self._call_deltas(piece, num_characters)
        return part._replace(
            text="".join(texts),
            reasoning="".join(reasoning),
            num_reasoning_tokens=sum([read.num_reasoning_tokens for read in reads]),
            begins_in_call=bool(reads) and reads[0].begins_in_call,
            tool_calls=deltas,
        )

    def _call_deltas(self, delta: CallDelta, place: int) -> Sequence[ToolCallDelta]:
        """One, or none of a call that is left out; it comes so far in its part's text."""
        name, arguments = delta
        begins = name is not None
        self._num_calls += begins
        if self._has_one_call and self._num_calls > 1:
            return ()
        call_id = f"call_{secrets.token_hex(12)}" if begins else None
        return (ToolCallDelta(self._num_calls - 1, call_id, name, arguments, place),)


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
