"""The form of requests: what OpenAI's clients send, and Tandem's extensions.

Owns which parameters there are, their types and ranges; `/openapi.json` is made of it. A field that
is marked `UNSUPPORTED` accepts only the value that asks for nothing, and is refused by name
otherwise. Unknown fields are refused, too.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field, Tag
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
    MAX_TOOLS,
    Message,
    Prediction,
    Tool,
    ToolChoice,
)
from gateway.api.openai.reading.parameters import at_most, fields_of
from gateway.api.wire import SAMPLING_LIMITS, SPECULATION_LIMITS
from gateway.requests.validation import MAX_CHOICES
from tandem.declared import MAX_UINT32
from tandem.values import SamplingParams, SpeculationParams

#: The most prompts of one request for completions.
MAX_PROMPTS = 128

#: The most alternatives of a token's logprob, as verifiers allow by default.
MAX_LOGPROBS = 20

MAX_MESSAGES = 4096

_Uint32 = Annotated[int, Field(ge=0, le=MAX_UINT32)]
_ShortText = Annotated[str, Field(max_length=256), at_most(256)]
_StopText = Annotated[str, Field(min_length=1, max_length=256), at_most(256)]


def _schema_kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "#bool"
    return "#object" if isinstance(value, dict) else None


def _prompt_kind(value: Any) -> str | None:
    if not isinstance(value, list):
        return text_or_list(value)
    first = value[0] if value else 0
    if isinstance(first, str):
        return "#texts"
    return "#token_lists" if isinstance(first, list) else "#tokens"


_Tokens = Annotated[list[_Uint32], Field(fail_fast=True, min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
_Prompt = Annotated[
    Annotated[_Text, Tag("#text")]
    | Annotated[_Tokens, Tag("#tokens")]
    | Annotated[list[_Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("#texts")]
    | Annotated[list[_Tokens], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("#token_lists")],
    one_of(
        _prompt_kind, "a string, a list of strings, a list of token ids, or a list of such lists"
    ),
]
_Stop = Annotated[
    Annotated[_StopText, Tag("#text")]
    | Annotated[list[_StopText], Field(fail_fast=True, max_length=16), Tag("#list")],
    one_of(text_or_list, "a string or a list of strings"),
]


class StreamOptions(RequestPart):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """Whether a last chunk without choices states the usage."""

    continuous_usage_stats: bool | None = None
    """Extension: whether, with `include_usage`, each other chunk states the tokens so far."""

    include_obfuscation: Annotated[Literal[False] | None, UNSUPPORTED] = None


class PromptCacheOptions(RequestPart):
    """How OpenAI's own service caches prompts: it changes no output."""

    mode: NotRead = None
    ttl: NotRead = None
    prewarm: Annotated[Literal[False] | None, UNSUPPORTED] = None
    comparison_response_id: Annotated[None, UNSUPPORTED] = None


if TYPE_CHECKING:
    _SpeculationParameters = RequestPart
    _SamplingParameters = RequestPart
else:
    _SpeculationParameters = pydantic.create_model(
        "SpeculationParameters",
        __base__=RequestPart,
        **fields_of(SpeculationParams, SPECULATION_LIMITS),
    )
    _SamplingParameters = pydantic.create_model(
        "SamplingParameters", __base__=RequestPart, **fields_of(SamplingParams, SAMPLING_LIMITS)
    )


class Speculation(_SpeculationParameters):
    """Tandem's extension: how drafts are made for this request. See docs/drafting.md."""

    report: bool | None = None
    """Whether each chunk of a stream says which of its tokens were drafted."""


class StructuredOutputs(RequestPart):
    """What the output's text must be: exactly one of these."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    """In the syntax of Lark; its first rule is `start`."""

    @pydantic.model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        given = (self.json_schema, self.regex, self.choice, self.grammar)
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError("not_one", "exactly one of its parameters must be given")
        return self


class TextFormat(RequestPart):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(RequestPart):
    """Any JSON object."""

    type: Literal["json_object"]


JsonSchema = Annotated[
    Annotated[dict[str, Any], Tag("#object")] | Annotated[bool, Tag("#bool")],
    one_of(_schema_kind, "an object or a boolean"),
]


class NamedSchema(RequestPart):
    """A JSON schema, as OpenAI's clients send it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonSchema, Field(alias="schema")] = True
    strict: bool | None = None
    """The output always follows the schema."""


class JsonSchemaFormat(RequestPart):
    """A JSON value that is valid under the schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class CommonRequest(_SamplingParameters):
    """What all requests that generate have in common."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """One of `/v1/models`."""

    stream: bool | None = None
    """Whether the answer comes in chunks, as server-sent events."""

    stop: _Stop | None = None
    """The output ends before the first of these texts."""

    user: _ShortText | None = None
    """Requests of a user go to the same verifier while it has room, for its cached prefixes."""

    prompt_cache_key: _ShortText | None = None
    """Counts instead of `user`."""

    # Extensions, with the names that other servers use.

    stop_token_ids: Annotated[list[_Uint32], Field(fail_fast=True, max_length=64)] | None = None
    """Extension: the output ends with any of these tokens."""

    ignore_eos: bool | None = None
    """Extension: do not end at the model's own end token."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Extension: higher first."""

    speculation: Speculation | None = None

    # What OpenAI's own service keeps account of: it changes no output.

    metadata: dict[str, Any] | None = None
    """Not looked at."""

    safety_identifier: str | None = None
    """Not looked at."""

    prompt_cache_retention: str | None = None
    """Not looked at: K/V stays in the prefix cache while there is room."""

    prompt_cache_options: PromptCacheOptions | None = None

    # What is not supported.

    moderation: Annotated[None, UNSUPPORTED] = None
    store: Annotated[Literal[False] | None, UNSUPPORTED] = None
    service_tier: Annotated[Literal["auto", "default"] | None, UNSUPPORTED] = None


class _ChoicesRequest(CommonRequest):
    """What requests for completions and for chat completions have in common."""

    stream_options: StreamOptions | None = None

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices per prompt; 1 by default."""

    structured_outputs: StructuredOutputs | None = None

    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None

    return_token_ids: bool | None = None
    """Extension: whether choices hold `token_ids`."""


class CompletionRequest(_ChoicesRequest):
    """A request for `/v1/completions`."""

    prompt: _Prompt
    """Text, token ids, or a list of either: one answer for each."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """16 by default."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Logprobs of each token and of so many alternatives."""

    echo: bool | None = None
    """Whether the answer begins with the prompt."""

    best_of: Annotated[Literal[1] | None, UNSUPPORTED] = None
    suffix: Annotated[Literal[""] | None, UNSUPPORTED] = None


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatCompletionRequest(_ChoicesRequest):
    """A request for `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]

    max_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """Up to the model's limit by default."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    """Counts instead of `max_tokens`."""

    logprobs: bool | None = None
    """Whether choices hold the logprobs of their tokens."""

    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives per token; needs `logprobs`."""

    tools: (
        Annotated[
            list[Annotated[Tool, of_kind("a tool", "function")]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    """For the model's chat template; its calls come as `tool_calls` where their form is known."""

    tool_choice: ToolChoice | None = None
    """`auto` by default; `required` or a function's name need structured output."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Extension: more variables for the chat template, such as `enable_thinking`."""

    reasoning_effort: ReasoningEffort | None = None
    """How much the model shall reason, if its chat template reads that: as `reasoning_effort`, or
    only whether, as `enable_thinking` or `thinking`. Other models take `none`."""

    prediction: Prediction | None = None
    """Text that the answer may repeat, such as a file to be edited: drafts are taken from it, too.
    Counts instead of `speculation.prediction`."""

    parallel_tool_calls: bool | None = None
    """Whether there may be several calls; if not, those after the first are left out."""

    functions: Annotated[list[Any] | None, Field(max_length=0), UNSUPPORTED] = None
    function_call: Annotated[Literal["none", "auto"] | None, UNSUPPORTED] = None
    audio: Annotated[None, UNSUPPORTED] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(fail_fast=True)] | None, UNSUPPORTED
    ] = None
    verbosity: Annotated[Literal["medium"] | None, UNSUPPORTED] = None
    web_search_options: Annotated[None, UNSUPPORTED] = None

    @pydantic.field_validator("top_logprobs")
    @classmethod
    def _need_logprobs(cls, value: int | None, info: pydantic.ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "it needs logprobs: true")
        return value
