"""From the messages of a chat completion to what the chat template is given.

Owns how OpenAI's messages become those that templates expect: text as one string, arguments of tool
calls as objects.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import message_schema, schema
from gateway.api.openai.reading.json_size import MAX_JSON_SIZE, json_size
from gateway.api.openai.reading.tools import callable_tools
from gateway.messages.request import Conversation
from gateway.text.chat_template import RESERVED_VARIABLES

# So many numbers take as long to read and to write as one string.
_NUMBERS_PER_STRING = 2


def conversation(parsed: schema.ChatCompletionRequest, *, num_bytes: int) -> Conversation:
    """What the template is given.

    Args:
        num_bytes: of the body.

    Raises:
        ApiError: a value is not the template's business, or too much to parse.
    """
    variables = parsed.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise ApiError(
                400,
                f"chat_template_kwargs must not hold {name}",
                param="chat_template_kwargs",
                code="invalid_value",
            )
    _check_arguments(parsed.messages)
    return Conversation(
        messages=[_message(each) for each in parsed.messages],
        tools=[tool.model_dump(include={"type", "function"}) for tool in callable_tools(parsed)],
        variables=variables,
        reasoning_effort=parsed.reasoning_effort or "",
        num_bytes=num_bytes,
    )


def _check_arguments(messages: Sequence[message_schema.Message]) -> None:
    """Refuses arguments of tool calls that hold more than can be parsed at once."""
    size = 0
    for index, message in enumerate(messages):
        for call in message.tool_calls or ():
            text = call.function.arguments.encode()
            size += json_size(text, numbers_per_string=_NUMBERS_PER_STRING)
        if size > MAX_JSON_SIZE:
            raise ApiError(
                413,
                f"the arguments of the tool calls hold more than {MAX_JSON_SIZE} strings, objects "
                f"and lists, where {_NUMBERS_PER_STRING} numbers count as one",
                param=f"messages.{index}.tool_calls",
                code="request_too_large",
            )


def _message(message: message_schema.Message) -> Mapping[str, Any]:
    given: dict[str, Any] = {
        # Templates know no developers: the role is the newer name of the same thing.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message),
    }
    thoughts = (
        message.reasoning_content,
        message.reasoning,
        message.reasoning_text,
        message.thinking,
    )
    if thoughts != (None,) * len(thoughts):
        given["reasoning_content"] = next(filter(None, thoughts), "")
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return given


def _text(message: message_schema.Message) -> str:
    content = message.content
    texts = [part.text for part in content] if isinstance(content, list) else [content]
    return "\n".join(text for text in (*texts, message.refusal) if text is not None)


def _arguments(text: str) -> Any:
    """What they say; or the text itself, where a model's call was cut or is no sound JSON: clients
    send it back as they got it.
    """
    try:
        arguments = json.loads(text or "{}")
        # Half of a surrogate pair is JSON, and no text; a template would write a number that is too
        # large as no JSON.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return arguments
