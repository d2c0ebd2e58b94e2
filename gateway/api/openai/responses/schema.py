"""The form of requests for `/v1/responses`.

As in `reading/schema.py`, a field that is marked `UNSUPPORTED` accepts only the value that asks for
nothing.
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.api.openai.reading.forms import (
    UNSUPPORTED,
    NotRead,
    RequestPart,
    of_kind,
    one_of,
    text_or_list,
)
from gateway.api.openai.reading.message_schema import (
    MAX_PARTS,
    MAX_TOOLS,
    RefusalPart,
    part_kind,
    text_or_named,
)
from gateway.api.openai.reading.schema import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    CommonRequest,
    JsonObjectFormat,
    JsonSchema,
    ReasoningEffort,
    TextFormat,
)
from tandem.declared import MAX_UINT32


class InputText(RequestPart):
    """A text of a message, or of what a tool gave."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NotRead = None
    cache_control: NotRead = None
    logprobs: NotRead = None
    parsed: NotRead = None
    prompt_cache_breakpoint: NotRead = None


_Texts = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[
        list[
            Annotated[
                Annotated[InputText, Tag("#text")] | Annotated[RefusalPart, Tag("#refusal")],
                Discriminator(part_kind),
                of_kind("a part", "input_text", "output_text", "text", "refusal"),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_PARTS),
        Tag("#list"),
    ],
    one_of(text_or_list, "a string or a list of parts"),
]


class InputMessage(RequestPart):
    """A message of the conversation so far."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts
    id: NotRead = None
    status: NotRead = None
    phase: NotRead = None


class DirectCaller(RequestPart):
    """The model itself."""

    type: Literal["direct"]


class InputCall(RequestPart):
    """A call of a tool that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON."""
    id: NotRead = None
    status: NotRead = None
    parsed_arguments: NotRead = None
    async_: Annotated[Literal[False] | None, UNSUPPORTED, Field(alias="async")] = None
    # As the official client's items are dumped.
    async_dumped: Annotated[Literal[False] | None, UNSUPPORTED, Field(alias="async_")] = None
    caller: Annotated[DirectCaller | None, UNSUPPORTED] = None
    namespace: Annotated[None, UNSUPPORTED] = None


class InputCallOutput(RequestPart):
    """What a tool gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Texts
    name: str | None = None
    id: NotRead = None
    status: NotRead = None
    caller: Annotated[DirectCaller | None, UNSUPPORTED] = None
    namespace: Annotated[None, UNSUPPORTED] = None


class ReasoningText(RequestPart):
    """A text of a model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestPart):
    """A model's reasoning, before its message or call, for templates that know it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = (
        None
    )
    id: NotRead = None
    status: NotRead = None
    summary: NotRead = None
    encrypted_content: NotRead = None


_KINDS = ("function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return f"#{kind}" if kind in _KINDS else "#message"


_Item = Annotated[
    Annotated[InputMessage, of_kind("an item", "message"), Tag("#message")]
    | Annotated[InputCall, Tag("#function_call")]
    | Annotated[InputCallOutput, Tag("#function_call_output")]
    | Annotated[InputReasoning, Tag("#reasoning")],
    one_of(_item_kind, "an object"),
]
_Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("#text")]
    | Annotated[
        list[_Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("#list")
    ],
    one_of(text_or_list, "a string or a list of items"),
]


class FunctionTool(RequestPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Not looked at: a call that must come follows the schema, others do as the model does."""
    output_schema: dict[str, Any] | None = None
    """A JSON schema of what it gives."""
    cache_control: NotRead = None
    allowed_callers: Annotated[
        Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None, UNSUPPORTED
    ] = None
    async_: Annotated[Literal[False] | None, UNSUPPORTED, Field(alias="async")] = None
    defer_loading: Annotated[Literal[False] | None, UNSUPPORTED] = None


class FunctionChoice(RequestPart):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[FunctionChoice, of_kind("a choice", "function"), Tag("#named")],
    one_of(text_or_named, "'none', 'auto', 'required' or a function"),
]


class NamedSchemaFormat(RequestPart):
    """A JSON value that is valid under the schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None
    """The output always follows the schema."""


class TextOptions(RequestPart):
    """The form of the output's text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Annotated[Literal["medium"] | None, UNSUPPORTED] = None


class Reasoning(RequestPart):
    """How the model shall reason."""

    effort: ReasoningEffort | None = None
    """As `reasoning_effort` of chat completions."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Not looked at: there are no summaries."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Not looked at."""
    context: Annotated[Literal["auto"] | None, UNSUPPORTED] = None
    mode: Annotated[Literal["standard"] | None, UNSUPPORTED] = None


class ResponseStreamOptions(RequestPart):
    """What a stream holds beside its events."""

    include_obfuscation: Annotated[Literal[False] | None, UNSUPPORTED] = None


class ResponsesRequest(CommonRequest):
    """A request for `/v1/responses`. Nothing is stored: it holds the whole conversation."""

    input: _Input
    """The user's text, or the items of the conversation so far."""

    instructions: str | None = None
    """A system message before the others."""

    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """Up to the model's limit by default."""

    stream_options: ResponseStreamOptions | None = None

    text: TextOptions | None = None

    tools: (
        Annotated[
            list[Annotated[FunctionTool, of_kind("a tool", "function")]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    """For the model's chat template; its calls come as items where their form is known."""

    tool_choice: _Choice | None = None
    """`auto` by default; `required` or a function's name need structured output."""

    parallel_tool_calls: bool | None = None
    """Whether there may be several calls; if not, those after the first are left out."""

    reasoning: Reasoning | None = None

    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                ]
            ],
            Field(fail_fast=True, max_length=16),
        ]
        | None
    ) = None
    """Whether the output's text has logprobs. Reasoning is not encrypted: it is in the answer. What
    the others would add belongs to items that no answer has."""

    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives per token; needs `message.output_text.logprobs`."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Extension: more variables for the chat template, such as `enable_thinking`."""

    max_tool_calls: int | None = None
    """Not looked at: it limits tools that the server runs itself, and there are none."""

    client_metadata: dict[str, Any] | None = None
    """Not looked at."""

    access_programs: Annotated[None, UNSUPPORTED] = None
    background: Annotated[Literal[False] | None, UNSUPPORTED] = None
    background_options: Annotated[None, UNSUPPORTED] = None
    context_management: Annotated[list[Any] | None, Field(max_length=0), UNSUPPORTED] = None
    image: Annotated[None, UNSUPPORTED] = None
    conversation: Annotated[None, UNSUPPORTED] = None
    previous_response_id: Annotated[None, UNSUPPORTED] = None
    prompt: Annotated[None, UNSUPPORTED] = None
    truncation: Annotated[Literal["disabled"] | None, UNSUPPORTED] = None

    @pydantic.field_validator("top_logprobs")
    @classmethod
    def _need_logprobs(cls, value: int | None, info: pydantic.ValidationInfo) -> int | None:
        if value and "message.output_text.logprobs" not in (info.data.get("include") or ()):
            raise PydanticCustomError(
                "needs_logprobs", "it needs message.output_text.logprobs in include"
            )
        return value
