"""The form of answers: whole ones and chunks, for completions and chat completions.

Owns the JSON of choices, which is written without a model of it: a stream writes a chunk per step.
`answer_schema.py` describes it.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from gateway.api.openai.tokens import CompletionLogprob
from gateway.messages.response import FinishReason

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}


class ToolCallDelta(NamedTuple):
    """What came of a call of a tool.

    Attributes:
        position: among the calls of its choice.
        call_id: by which the client answers it; None: the call goes on.
        name: of the tool; None: the call goes on.
        arguments: the next piece of a JSON object; "" where a call begins.
    """

    position: int
    call_id: str | None
    name: str | None
    arguments: str

    def fields(self) -> dict[str, Any]:
        """As chunks state it."""
        if self.name is None:
            return {"index": self.position, "function": {"arguments": self.arguments}}
        return {"index": self.position, **_whole_call(self, self.arguments)}


class Part(NamedTuple):
    """Some of the output of one choice.

    Attributes:
        logprobs: of the form's own type; None: not requested.
        token_ids: None: not requested.
        speculation: how the drafts of its steps fared, as JSON; "": not requested.
        tool_calls: what came of calls.
    """

    text: str
    logprobs: list[Any] | None
    token_ids: list[int] | None
    speculation: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to show."""
        return not any(
            (self.text, self.logprobs, self.token_ids, self.speculation, self.tool_calls)
        )


class Form(Protocol):
    """How one kind of answer is written."""

    #: The `object` of a whole answer and of a chunk, and how ids begin.
    whole_object: str
    chunk_object: str
    id_prefix: str

    def first(self, index: int) -> str:
        """The choice of a stream's first chunk, before any text; "" if there is none."""

    def deltas(self, index: int, part: Part) -> list[str]:
        """The choices of one chunk or several, in order. What is not of a call is in the first."""

    def last(self, index: int, reason: FinishReason, *, has_calls: bool) -> str:
        """The choice of a choice's last chunk.

        Args:
            has_calls: whether any part of it had tool calls.
        """

    def whole(self, index: int, part: Part, reason: FinishReason) -> str:
        """The choice of a whole answer."""


class CompletionForm:
    """`/v1/completions`."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def first(self, index: int) -> str:
        return ""

    def deltas(self, index: int, part: Part) -> list[str]:
        return [self._choice(index, part, "null")]

    def last(self, index: int, reason: FinishReason, *, has_calls: bool) -> str:
        return self._choice(index, Part("", None, None), _quoted_reason(reason))

    def whole(self, index: int, part: Part, reason: FinishReason) -> str:
        return self._choice(index, part, _quoted_reason(reason))

    def _choice(self, index: int, part: Part, reason: str) -> str:
        return (
            f'{{"index":{index},"text":{json.dumps(part.text)},'
            f'"logprobs":{self._logprobs(part.logprobs)},"finish_reason":{reason}'
            f"{_token_ids(part)}}}"
        )

    def _logprobs(self, logprobs: Sequence[CompletionLogprob] | None) -> str:
        if logprobs is None:
            return "null"
        return (
            f'{{"tokens":[{",".join([each.token for each in logprobs])}],'
            f'"token_logprobs":[{",".join([each.logprob for each in logprobs])}],'
            f'"top_logprobs":[{",".join([each.top for each in logprobs])}],'
            f'"text_offset":[{",".join([each.offset for each in logprobs])}]}}'
        )


class ChatForm:
    """`/v1/chat/completions`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first(self, index: int) -> str:
        return (
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def deltas(self, index: int, part: Part) -> list[str]:
        calls = part.tool_calls
        delta: dict[str, Any] = {}
        if part.text or not calls:
            delta["content"] = part.text
        if calls:
            delta["tool_calls"] = [calls[0].fields()]
        # Clients expect a call at most once in a chunk.
        return [
            f'{{"index":{index},"delta":{json.dumps(delta)},'
            f'"logprobs":{self._logprobs(part.logprobs)},"finish_reason":null{_token_ids(part)}}}',
            *(
                f'{{"index":{index},"delta":{json.dumps({"tool_calls": [call.fields()]})},'
                '"logprobs":null,"finish_reason":null}'
                for call in calls[1:]
            ),
        ]

    def last(self, index: int, reason: FinishReason, *, has_calls: bool) -> str:
        return (
            f'{{"index":{index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":{_quoted_reason(reason, has_calls)}}}'
        )

    def whole(self, index: int, part: Part, reason: FinishReason) -> str:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": part.text if part.text or not part.tool_calls else None,
            "refusal": None,
        }
        if part.tool_calls:
            message["tool_calls"] = _whole_calls(part.tool_calls)
        return (
            f'{{"index":{index},"message":{json.dumps(message)},'
            f'"logprobs":{self._logprobs(part.logprobs)},'
            f'"finish_reason":{_quoted_reason(reason, bool(part.tool_calls))}{_token_ids(part)}}}'
        )

    def _logprobs(self, logprobs: Sequence[str] | None) -> str:
        return (
            "null" if logprobs is None else f'{{"content":[{",".join(logprobs)}],"refusal":null}}'
        )


class Envelope:
    """What surrounds the choices of one answer: the same in each of its chunks."""

    def __init__(
        self,
        form: Form,
        *,
        request_id: str,
        model: str,
        is_stream: bool,
        includes_usage: bool,
    ) -> None:
        """Args:
        form: of the answer.
        request_id: becomes its id.
        model: as the request names it.
        is_stream: whether there will be chunks.
        includes_usage: whether the last chunk states the usage; then the others say null.
        """
        kind = form.chunk_object if is_stream else form.whole_object
        self._head = (
            f'{{"id":{json.dumps(form.id_prefix + request_id)},"object":"{kind}",'
            f'"created":{int(time.time())},"model":{json.dumps(model)},"choices":['
        )
        self._tail = ',"usage":null}\n\n' if includes_usage else "}\n\n"

    def chunk(
        self, choices: str, speculation: str = "", usage: dict[str, int] | None = None
    ) -> str:
        """A chunk, as a server-sent event.

        Args:
            choices: as JSON.
            speculation: how the chunk's drafts fared, as JSON; "": not requested.
            usage: the tokens so far; None: not requested.
        """
        report = f',"speculation":{speculation}' if speculation else ""
        tail = self._tail if usage is None else f',"usage":{json.dumps(usage)}}}\n\n'
        return f"data: {self._head}{choices}]{report}{tail}"

    def usage_chunk(self, usage: dict[str, Any]) -> str:
        """The chunk that states the usage, as a server-sent event."""
        return f'data: {self._head}],"usage":{json.dumps(usage)}}}\n\n'

    def whole(self, choices: Sequence[str], usage: dict[str, Any]) -> str:
        """A whole answer."""
        return f'{self._head}{",".join(choices)}],"usage":{json.dumps(usage)}}}'


def error_event(error_body: str) -> str:
    """An error in the middle of a stream, as a server-sent event."""
    return f"data: {error_body}\n\n"


DONE = "data: [DONE]\n\n"


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    pieces: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            pieces.append([])
        pieces[-1].append(delta.arguments)
    begins = [delta for delta in deltas if delta.name is not None]
    return [_whole_call(b, "".join(each)) for b, each in zip(begins, pieces, strict=True)]


def _whole_call(begin: ToolCallDelta, arguments: str) -> dict[str, Any]:
    return {
        "id": begin.call_id,
        "type": "function",
        "function": {"name": begin.name, "arguments": arguments},
    }


def _quoted_reason(reason: FinishReason, has_calls: bool = False) -> str:
    if has_calls and reason is FinishReason.STOP:
        return '"tool_calls"'
    return f'"{_FINISH_REASONS[reason]}"'


def _token_ids(part: Part) -> str:
    return "" if part.token_ids is None else f',"token_ids":{json.dumps(part.token_ids)}'
