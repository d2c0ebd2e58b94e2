"""The form in which a chat template reads messages.

Owns which forms there are, and how a template's own is found: by what it shows of short
conversations. Templates say nowhere which form they read, and one that gets another shows nothing
of a message rather than to fail.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

# Words that no template has of its own.
_WORD = "probetext"
_NAME = "probecall"

_USER = {"role": "user", "content": _WORD}
_CALL = {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
_WITH_CALL: Messages = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "", "tool_call_id": "probe0000"},
)
#: What a template for conversations with tools is tried with.
PROBE_TOOLS: Messages = (
    {
        "type": "function",
        "function": {
            "name": "probetool",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What a template expects; the defaults are what most do.

    Attributes:
        content_as_parts: `content` as a list of one part; else as text.
        none_beside_calls: None as the content of a message with tool calls and no text; else "".
        arguments_as_text: arguments of tool calls as JSON; else as objects.
    """

    content_as_parts: bool = False
    none_beside_calls: bool = False
    arguments_as_text: bool = False

    def messages(self, messages: Messages) -> Messages:
        """In this form.

        Args:
            messages: in the default form; they stay as they are.
        """
        return [self._message(each) for each in messages]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        given = dict(message)
        if "reasoning_content" in given:
            # As gpt-oss's template names it.
            given.setdefault("thinking", given["reasoning_content"])
        calls = message.get("tool_calls")
        if self.none_beside_calls and calls and not message["content"]:
            given["content"] = None
        elif self.content_as_parts:
            given["content"] = [{"type": "text", "text": message["content"]}]
        if self.arguments_as_text and calls:
            given["tool_calls"] = [_with_text(call) for call in calls]
        return given


def find_form(render: Callable[[Messages], str]) -> MessageForm:
    """The form that a template reads.

    Where no form makes it show what it should, it gets the default one: it may refuse these
    conversations for any other reason.

    Args:
        render: by the template; "" where it does not accept them.
    """
    form = MessageForm()
    for as_parts in (False, True):
        tried = dataclasses.replace(form, content_as_parts=as_parts)
        if _WORD in render(tried.messages([_USER])).casefold():
            form = tried
            break
    for as_text in (False, True):
        for is_none in (False, True):
            tried = dataclasses.replace(form, none_beside_calls=is_none, arguments_as_text=as_text)
            if _NAME in render(tried.messages(_WITH_CALL)).casefold():
                return tried
    return form


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    # What is no JSON is text already.
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
