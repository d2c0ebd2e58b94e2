"""The form of a conversation: messages, their parts, and the tools that may be called."""

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

MAX_TOOLS = 128
MAX_PARTS = 1024


class TextPart(RequestPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    annotations: NotRead = None
    cache_control: NotRead = None
    prompt_cache_breakpoint: NotRead = None


class RefusalPart(RequestPart):
    """A part of an assistant's message: text like any other."""

    type: Literal["refusal"]
    refusal: str
    cache_control: NotRead = None

    @property
    def text(self) -> str:
        """As of a text."""
        return self.refusal


def part_kind(value: Any) -> str:
    """Tells a refusal from texts."""
    is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
    return "#refusal" if is_refusal else "#text"


class EarlierFunction(RequestPart):
    """The function of an earlier tool call."""

    name: str
    arguments: str
    """JSON."""
    parsed_arguments: NotRead = None
    provider_specific_fields: NotRead = None


class EarlierToolCall(RequestPart):
    """A tool call of an assistant's earlier message."""

    id: str
    type: Literal["function"] | None = None
    function: EarlierFunction
    cache_control: NotRead = None
    extra_content: NotRead = None
    index: NotRead = None
    provider_specific_fields: NotRead = None


_Content = Annotated[
    Annotated[str, Tag("#text")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("#text")] | Annotated[RefusalPart, Tag("#refusal")],
                Discriminator(part_kind),
                of_kind("content", "text", "refusal"),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_PARTS),
        Tag("#list"),
    ],
    one_of(text_or_list, "a string or a list of parts"),
]


class Prediction(RequestPart):
    """What the answer may repeat."""

    type: Literal["content"]
    content: _Content

    @property
    def text(self) -> str:
        """All of it."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(RequestPart):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: (
        Annotated[
            list[Annotated[EarlierToolCall, of_kind("a tool call", "function")]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """An assistant's, after its `content`."""
    reasoning_content: str | None = None
    """Extension: an assistant's thoughts, for templates that know them."""

    # The same by the names of other servers.
    reasoning: str | None = None
    """Counts where there is no `reasoning_content`."""
    reasoning_text: str | None = None
    """Counts where there is none of the former."""
    thinking: str | None = None
    """Counts where there is none of the former."""

    # What servers and clients note of an answer, in messages that are sent back as they came.
    annotations: NotRead = None
    cache_control: NotRead = None
    citations: NotRead = None
    extra_content: NotRead = None
    finish_reason: NotRead = None
    id: NotRead = None
    index: NotRead = None
    logprobs: NotRead = None
    parsed: NotRead = None
    phase: NotRead = None
    provider_specific_fields: NotRead = None
    reasoning_details: NotRead = None
    reasoning_opaque: NotRead = None
    status: NotRead = None
    stop_reason: NotRead = None
    thinking_blocks: NotRead = None
    token_ids: NotRead = None
    usage: NotRead = None

    audio: Annotated[None, UNSUPPORTED] = None
    function_call: Annotated[None, UNSUPPORTED] = None
    images: Annotated[list[Any] | None, Field(max_length=0), UNSUPPORTED] = None
    partial: Annotated[Literal[False] | None, UNSUPPORTED] = None
    prefix: Annotated[Literal[False] | None, UNSUPPORTED] = None


class Tool(RequestPart):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]
    """Its `name`, `description` and `parameters`, a JSON schema."""
    cache_control: NotRead = None

    @pydantic.field_validator("function")
    @classmethod
    def _has_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        name = value.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise PydanticCustomError("no_name", "name must be a string of 1 to 256 characters")
        if not isinstance(value.get("parameters") or {}, dict):
            raise PydanticCustomError("no_schema", "parameters must be an object")
        return value


class NamedFunction(RequestPart):
    """A function by its name."""

    name: str


class NamedToolChoice(RequestPart):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def text_or_named(value: Any) -> str | None:
    return "#named" if isinstance(value, dict) else text_or_list(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#text")]
    | Annotated[NamedToolChoice, of_kind("a choice", "function"), Tag("#named")],
    one_of(text_or_named, "'none', 'auto', 'required' or a function"),
]
