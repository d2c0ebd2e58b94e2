"""A request's text as tokens, and the text of its output.

Owns which work goes to the tokenizer's threads, and the refusal of texts that are too long. Knows
no verifier and no stream.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from gateway.messages.request import AcceptedRequest, Conversation, GenerateRequest
from gateway.messages.response import Model
from gateway.requests import acceptance
from gateway.requests.acceptance import RequestDefaults
from gateway.text.chat_template import (
    ChatTemplateError,
    NoReasoningEffortError,
    RenderedTooLongError,
)
from gateway.text.model_text import ModelText
from gateway.text.output.argument_values import parameters_of
from gateway.text.output.output_text import OutputText
from gateway.text.output.parts import Reading
from gateway.text.reasoning import THINK, Reasoning, reasoning_after
from gateway.text.tokenizer import CONTEXT_TOKENS, TooManyTokensError
from gateway.text.tokenizer_threads import TokenizerThreads
from tandem.values import ReasoningTags, SamplingParams

#: Of a text that is put into a pool: as many as a pool holds, about.
MAX_TEXT_TOKENS = 1 << 20

# About as much text as a token stands for.
_CHARACTERS_PER_TOKEN = 4


class Prompt(NamedTuple):
    """A prompt as its model gets it, and what that says of the output.

    Attributes:
        sampling: the request's; a grammar begins behind the reasoning.
        reading: what is told apart in the output; None: nothing.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    reading: Reading | None = None


def estimate_held_tokens(request: GenerateRequest) -> int:
    """About how many tokens the request's prompt and prediction will have."""
    num_tokens, num_characters = 0, len(request.speculation.prediction)
    if request.prompt_token_ids is not None:
        num_tokens = len(request.prompt_token_ids)
    elif request.conversation is not None:
        num_characters += request.conversation.num_bytes
    else:
        num_characters += len(request.text or "")
    return num_tokens + num_characters // _CHARACTERS_PER_TOKEN


class RequestTexts:
    """Encodes prompts and begins outputs; on the event loop, which long texts never block."""

    def __init__(self, threads: TokenizerThreads, defaults: RequestDefaults) -> None:
        """Args:
        threads: for long texts.
        defaults: values that requests leave open.
        """
        self._threads = threads
        self._defaults = defaults

    async def encode_prompt(
        self, request: GenerateRequest, model: Model, text: ModelText | None
    ) -> Prompt:
        """The prompt, whichever form it was given in.

        Args:
            text: the model's; None only if the request has no text.

        Raises:
            InvalidRequestError: it is too long, or the chat template refuses the conversation.
            UnsupportedFieldError: a conversation, and the model has no chat template, or one that
                is not told how much to reason.
        """
        if request.prompt_token_ids is not None:
            return Prompt(request.prompt_token_ids, request.sampling)
        assert text is not None, "checked"
        if (conversation := request.conversation) is None:
            assert request.text is not None, "checked"
            return Prompt(await self._encode(request.text, model, text), request.sampling)
        prompt = await self._render(conversation, model, text)
        reading = Reading(
            reasoning=reasoning_after(prompt, text.reasoning) if text.reasoning else Reasoning.NONE,
            tags=text.reasoning or THINK,
            form=text.tool_call_form,
            tools={each["function"]["name"]: parameters_of(each) for each in conversation.tools},
            has_channels=text.has_channels,
        )
        sampling = _behind_reasoning(request.sampling, reading)
        return Prompt(await self._encode(prompt, model, text), sampling, reading)

    async def encode_prediction(
        self, request: GenerateRequest, model: Model, text: ModelText | None
    ) -> Sequence[int]:
        """The tokens of what the output may repeat; `text` as in `encode_prompt`.

        Raises:
            InvalidRequestError: there are more than the model's longest sequence has.
        """
        prediction = request.speculation.prediction
        if not prediction or request.speculation.enabled is False:
            return ()
        assert text is not None, "checked"
        return await self.encode_text(
            prediction, text, max_tokens=model.max_model_len, field="speculation.prediction"
        )

    async def encode_text(
        self,
        given: str,
        text: ModelText,
        *,
        max_tokens: int = MAX_TEXT_TOKENS,
        field: str = "text",
    ) -> Sequence[int]:
        """The tokens of a text that no model computes.

        Args:
            text: the model's.
            field: which holds it.

        Raises:
            InvalidRequestError: there are more than `max_tokens`.
        """
        try:
            return await self._threads.run(
                len(given.encode()), text.tokenizer.encode, given, max_tokens=max_tokens
            )
        except TooManyTokensError:
            raise InvalidRequestError(
                f"the text has more than {max_tokens} tokens", field=field
            ) from None

    async def begin_output(self, request: AcceptedRequest, text: ModelText | None) -> OutputText:
        """The text of every choice, after the output that the client already has.

        Text that the given output leaves incomplete or held back comes with the first chunk, as it
        would have if the stream had not been interrupted.

        Args:
            text: the model's; None: the output has tokens only.

        Raises:
            InvalidRequestError: the given output holds a stop sequence.
        """
        if text is None:
            return OutputText(None)
        prompt, given = request.prompt_token_ids, request.output_token_ids
        if not request.stop_sequences:
            # The last tokens suffice.
            last = [*prompt[-CONTEXT_TOKENS:], *given[-CONTEXT_TOKENS:]]
            return OutputText(
                text.tokenizer.detokenizer(last),
                reading=request.reading,
                reports_tokens=request.report_tokens,
            )
        output_text = OutputText(
            text.tokenizer.detokenizer(prompt),
            request.stop_sequences,
            min_tokens=request.sampling.min_new_tokens,
            reading=request.reading,
            reports_tokens=request.report_tokens,
        )
        await self._threads.run(len(given) * _CHARACTERS_PER_TOKEN, output_text.skip, given)
        if output_text.stopped:
            raise InvalidRequestError(
                "the output already holds a stop sequence", field="output_token_ids"
            )
        return output_text

    async def _render(self, conversation: Conversation, model: Model, text: ModelText) -> str:
        if text.chat_template is None:
            raise UnsupportedFieldError(
                f"the model {model.model_id} has no chat template", field="messages"
            )
        try:
            return await self._threads.run(
                conversation.num_bytes,
                text.chat_template.render,
                conversation.messages,
                tools=conversation.tools or None,
                variables=conversation.variables,
                reasoning_effort=conversation.reasoning_effort,
            )
        except NoReasoningEffortError as error:
            raise UnsupportedFieldError(str(error), field="reasoning_effort") from None
        except RenderedTooLongError as error:
            raise PromptTooLongError(str(error), field="messages") from None
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error), field="messages") from None

    async def _encode(self, prompt: str, model: Model, text: ModelText) -> Sequence[int]:
        tokenizer = text.tokenizer
        max_tokens = acceptance.max_prompt_tokens(model, self._defaults)
        # A text that is certainly too long is refused before it is encoded.
        num_bytes, max_bytes = len(prompt.encode()), tokenizer.max_bytes(max_tokens)
        if max_bytes is not None and num_bytes > max_bytes:
            raise PromptTooLongError(
                f"{num_bytes} bytes are more than the {max_tokens} tokens that it may have",
                field="text",
            )
        try:
            return await self._threads.run(
                num_bytes, tokenizer.encode, prompt, max_tokens=max_tokens
            )
        except TooManyTokensError as error:
            raise acceptance.prompt_too_long(
                error.num_tokens, model, self._defaults, "text", is_exact=error.is_exact
            ) from None


def _behind_reasoning(sampling: SamplingParams, reading: Reading) -> SamplingParams:
    """The sampling of an output whose grammar, if it has one, begins behind its reasoning."""
    grammar = sampling.structured_output
    if grammar is None or reading.reasoning in (Reasoning.NONE, Reasoning.IS_OVER):
        return sampling
    begin = "" if reading.reasoning is Reasoning.HAS_BEGUN else reading.tags.begin
    tags = ReasoningTags(begin=begin, end=reading.tags.end)
    grammar = dataclasses.replace(grammar, reasoning=tags)
    return dataclasses.replace(sampling, structured_output=grammar)
