"""How answers are written: whole ones and chunks, for completions and chat completions.

Owns the JSON of choices, which is written without a model of it: a stream writes a chunk per step.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from gateway.api.openai.errors import ApiError
from gateway.api.openai.writing.tokens import CompletionLogprob
from gateway.api.openai.writing.usage import UsageTotal
from tandem.values import FinishReason

#: What an answer may hold that stays in memory to its end.
MAX_ANSWER_BYTES = 32 << 20

# Six digits, and the comma and the space between two.
_BYTES_PER_TOKEN_ID = 8


class ToolCallDelta(NamedTuple):
    """What came of a call of a tool.

    Attributes:
        position: among the calls of its choice.
        call_id: by which the client answers it; None: the call goes on.
        name: of the tool; None: the call goes on.
        arguments: the next piece of a JSON object; "" where a call begins.
        place: so many characters of its part's text come before it.
    """

    position: int
    call_id: str | None
    name: str | None
    arguments: str
    place: int

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
        reasoning: of the model, before its answer.
        num_reasoning_tokens: those that it has become known to have.
        begins_in_call: whether the output before it ends within a call.
        parts: the same, token by token, if wanted.
    """

    text: str
    logprobs: list[Any] | None
    token_ids: list[int] | None
    speculation: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    begins_in_call: bool = False
    parts: Sequence["Part"] = ()

    @property
    def num_bytes(self) -> int:
        """About as much as it takes as JSON."""
        texts = (self.text, self.reasoning, *(call.arguments for call in self.tool_calls))
        num_bytes = _BYTES_PER_TOKEN_ID * len(self.token_ids or ())
        num_bytes += sum(len(json.dumps(text)) for text in texts if text)
        return num_bytes + sum(
            len(each) if isinstance(each, str) else sum(map(len, each))
            for each in self.logprobs or ()
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to show."""
        return not any(
            (
                self.text,
                self.logprobs,
                self.token_ids,
                self.speculation,
                self.tool_calls,
                self.reasoning,
            )
        )


class Answer(Protocol):
    """One answer, as the writer asks for it: events of a stream, or all at the end.

    Every text is of server-sent events, several or none, but that of `whole`.
    """

    def begin(self) -> str:
        """What a stream begins with."""

    def part(self, index: int, part: Part, usage: UsageTotal) -> str:
        """A part of a choice that is not empty. `usage`: with the part."""

    def last(self, index: int, reason: FinishReason, usage: UsageTotal, *, has_calls: bool) -> str:
        """The end of a choice.

        Args:
            has_calls: whether any part of it had tool calls.
        """

    def end(self, usage: UsageTotal) -> str:
        """What a stream ends with."""

    def error(self, error: ApiError) -> str:
        """What a stream ends with that fails."""

    def collect(self, index: int, parts: Sequence[Part], reason: FinishReason) -> None:
        """All parts of a choice, of an answer that is no stream."""

    def whole(self, usage: UsageTotal) -> str:
        """The answer, when all choices are collected: JSON."""


class Form(Protocol):
    """How the choices of one kind of answer are written."""

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
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.text or not (calls or part.reasoning):
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
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
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


class ChunkAnswer:
    """Implements `Answer`: choices in one envelope, the same for each chunk."""

    def __init__(
        self,
        form: Form,
        *,
        request_id: str,
        model: str,
        num_choices: int,
        is_stream: bool,
        includes_usage: bool,
        repeats_usage: bool,
    ) -> None:
        """Args:
        form: of the choices.
        request_id: becomes its id.
        model: as the request names it.
        is_stream: whether there will be chunks.
        includes_usage: whether the last chunk states the usage; then the others say null.
        repeats_usage: whether each chunk states the tokens so far.
        """
        self._form = form
        kind = form.chunk_object if is_stream else form.whole_object
        self._head = (
            f'{{"id":{json.dumps(form.id_prefix + request_id)},"object":"{kind}",'
            f'"created":{int(time.time())},"model":{json.dumps(model)},"choices":['
        )
        self._tail = ',"usage":null}\n\n' if includes_usage else "}\n\n"
        self._includes_usage = includes_usage
        self._repeats_usage = repeats_usage
        self._choices = [""] * num_choices

    def begin(self) -> str:
        firsts = (self._form.first(index) for index in range(len(self._choices)))
        return "".join([self._chunk(first) for first in firsts if first])

    def part(self, index: int, part: Part, usage: UsageTotal) -> str:
        first, *others = self._form.deltas(index, part)
        so_far = self._so_far(usage)
        return self._chunk(first, so_far, part.speculation) + "".join(
            [self._chunk(each, so_far) for each in others]
        )

    def last(self, index: int, reason: FinishReason, usage: UsageTotal, *, has_calls: bool) -> str:
        last = self._form.last(index, reason, has_calls=has_calls)
        return self._chunk(last, self._so_far(usage))

    def end(self, usage: UsageTotal) -> str:
        done = "data: [DONE]\n\n"
        if not self._includes_usage:
            return done
        return f'data: {self._head}],"usage":{json.dumps(usage.to_json())}}}\n\n{done}'

    def error(self, error: ApiError) -> str:
        # The official client raises what it says.
        return f"data: {error.body()}\n\n"

    def collect(self, index: int, parts: Sequence[Part], reason: FinishReason) -> None:
        self._choices[index] = self._form.whole(index, _join(parts), reason)

    def whole(self, usage: UsageTotal) -> str:
        return f'{self._head}{",".join(self._choices)}],"usage":{json.dumps(usage.to_json())}}}'

    def _so_far(self, usage: UsageTotal) -> dict[str, int] | None:
        return usage.so_far() if self._repeats_usage else None

    def _chunk(
        self, choice: str, usage: dict[str, int] | None = None, speculation: str = ""
    ) -> str:
        """A chunk.

        Args:
            choice: as JSON.
            usage: the tokens so far; None: not requested.
            speculation: how the chunk's drafts fared, as JSON; "": not requested.
        """
        report = f',"speculation":{speculation}' if speculation else ""
        tail = self._tail if usage is None else f',"usage":{json.dumps(usage)}}}\n\n'
        return f"data: {self._head}{choice}]{report}{tail}"


def _join(parts: Sequence[Part]) -> Part:
    first = parts[0] if parts else Part("", None, None)
    return Part(
        "".join([part.text for part in parts]),
        None
        if first.logprobs is None
        else [each for part in parts for each in part.logprobs or ()],
        None
        if first.token_ids is None
        else [id_ for part in parts for id_ in part.token_ids or ()],
        tool_calls=[call for part in parts for call in part.tool_calls],
        reasoning="".join([part.reasoning for part in parts]),
    )


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
    return f'"{reason}"'


def _token_ids(part: Part) -> str:
    return "" if part.token_ids is None else f',"token_ids":{json.dumps(part.token_ids)}'
