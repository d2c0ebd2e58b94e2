"""The form of responses and of their events, for `/openapi.json` and for tests."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from tests.gateway.openai.answer_schema import (
    AnswerPart,
    CompletionTokensDetails,
    ErrorBody,
    PromptTokensDetails,
    SpeculationUsage,
    TokenLogprob,
)

_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerPart):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[TokenLogprob]
    """Empty, if not requested."""


class OutputMessage(AnswerPart):
    """Text of the model."""

    id: str
    type: Literal["message"]
    status: _ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]
    """One part; none where the message begins."""


class OutputCall(AnswerPart):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: _ItemStatus
    call_id: str
    name: str
    arguments: str
    """As in chat completions."""


class OutputReasoningText(AnswerPart):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(AnswerPart):
    """What the model wrote before its answer, where that is known."""

    id: str
    type: Literal["reasoning"]
    status: _ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[OutputReasoningText]
    """One part; none where the item begins."""


_Item = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class ChosenFunction(AnswerPart):
    type: Literal["function"]
    name: str


class IncompleteDetails(AnswerPart):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: Literal[0]
    """The prefix cache keeps no account of what is written to it."""


class ResponseUsage(AnswerPart):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    speculation: SpeculationUsage


class Response(AnswerPart):
    """A whole response. `instructions`, `tools` and `metadata` are not repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: None
    metadata: Annotated[dict[str, Any], Field(max_length=0)]
    output: list[_Item]
    previous_response_id: None
    store: Literal[False]
    tools: Annotated[list[Any], Field(max_length=0)]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    max_output_tokens: int | None
    model: str
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction
    top_p: float


class _Event(AnswerPart):
    sequence_number: int


class _ItemEvent(_Event):
    item_id: str
    output_index: int


class ResponseStateEvent(_Event):
    """A response begins, or ends: then it is whole."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: Response


class OutputItemEvent(_Event):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: _Item


class ContentPartEvent(_ItemEvent):
    """The part of a message, or of reasoning, begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_ItemEvent):
    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(_ItemEvent):
    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDeltaEvent(_ItemEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningDoneEvent(_ItemEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDeltaEvent(_ItemEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_ItemEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(_Event):
    """The stream ends with an error."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: ErrorBody


class ResponseEvent(
    pydantic.RootModel[
        Annotated[
            ResponseStateEvent
            | OutputItemEvent
            | ContentPartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of a stream's event; the event's name is its type."""
