"""How a response is written: its items, and the events of a stream that tell of them.

Owns the JSON of both, which is written without a model of it, as in `answers.py`. An answer keeps
its items to the end: the last event of a stream repeats all of them.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from gateway.api.openai.errors import ApiError
from gateway.api.openai.responses.schema import FunctionChoice, ResponsesRequest
from gateway.api.openai.writing.answers import MAX_ANSWER_BYTES, Part, ToolCallDelta
from gateway.api.openai.writing.usage import UsageTotal
from tandem.values import FinishReason, SamplingParams

_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}
_IN_PROGRESS = "in_progress"

# A stream's last events repeat what it holds: as a text, a part, an item and in the whole.
_TIMES_WRITTEN = 4


@dataclass(slots=True)
class _Message:
    """The model's answer, while it comes."""

    id: str
    texts: list[str] = field(default_factory=list)
    # As JSON.
    logprobs: list[str] = field(default_factory=list)

    prefix: ClassVar = "msg"
    # How its own events begin.
    event: ClassVar = "response.output_text"

    def written(self) -> dict[str, str]:
        """What came of it, as JSON."""
        return {"text": json.dumps("".join(self.texts)), "logprobs": _list(self.logprobs)}

    def part(self, *, text: str, logprobs: str) -> str:
        """Its only part. What is given: as JSON."""
        return _object(type='"output_text"', text=text, annotations="[]", logprobs=logprobs)

    def item(self, status: str, *parts: str) -> str:
        return _object(
            id=json.dumps(self.id),
            type='"message"',
            status=json.dumps(status),
            role='"assistant"',
            content=_list(parts),
        )


@dataclass(slots=True)
class _Reasoning:
    """The model's reasoning, while it comes."""

    id: str
    texts: list[str] = field(default_factory=list)

    prefix: ClassVar = "rs"
    event: ClassVar = "response.reasoning_text"

    def written(self) -> dict[str, str]:
        return {"text": json.dumps("".join(self.texts))}

    def part(self, *, text: str) -> str:
        return _object(type='"reasoning_text"', text=text)

    def item(self, status: str, *parts: str) -> str:
        return _object(
            id=json.dumps(self.id),
            type='"reasoning"',
            status=json.dumps(status),
            summary="[]",
            content=_list(parts),
        )


@dataclass(slots=True)
class _Call:
    """A call of a tool, while it comes."""

    id: str
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def item(self, status: str, arguments: str = '""') -> str:
        return _object(
            id=json.dumps(self.id),
            type='"function_call"',
            status=json.dumps(status),
            call_id=json.dumps(self.call_id),
            name=json.dumps(self.name),
            arguments=arguments,
        )


_T = TypeVar("_T", _Message, _Reasoning)


class ResponseAnswer:
    """Implements `Answer`; it has one choice."""

    def __init__(
        self, parsed: ResponsesRequest, *, sampling: SamplingParams, request_id: str
    ) -> None:
        choice = parsed.tool_choice
        self._id = f"resp_{request_id}"
        self._created_at = int(time.time())
        # A whole answer has no events, and the last ones of a stream are long.
        self._is_stream = bool(parsed.stream)
        # What the answer repeats of its request. Instructions, tools and schemas may be long.
        self._repeated = {
            "max_output_tokens": json.dumps(parsed.max_output_tokens),
            "model": json.dumps(parsed.model),
            "parallel_tool_calls": json.dumps(parsed.parallel_tool_calls is not False),
            "temperature": json.dumps(sampling.temperature),
            "tool_choice": _object(type='"function"', name=json.dumps(choice.name))
            if isinstance(choice, FunctionChoice)
            else json.dumps(choice or "auto"),
            "top_p": json.dumps(sampling.top_p),
        }
        # Items that are whole, as JSON; and the one that comes.
        self._items: list[str] = []
        self._open: _Message | _Reasoning | _Call | None = None
        self._status = _IN_PROGRESS
        # Of tokens whose text has not come yet.
        self._held_logprobs: list[str] = []
        self._num_events = 0
        # Of the texts, arguments and logprobs that are kept, as JSON.
        self._num_bytes = 0

    def begin(self) -> str:
        return "".join(
            [
                self._event(kind, response=self._response())
                for kind in ("response.created", "response.in_progress")
            ]
        )

    def part(self, index: int, part: Part, usage: UsageTotal) -> str:
        events = self._take(part)
        if self._num_bytes > MAX_ANSWER_BYTES // _TIMES_WRITTEN:
            raise ApiError(
                400,
                f"the answer is over {MAX_ANSWER_BYTES // _TIMES_WRITTEN} bytes",
                param="max_output_tokens",
                code="answer_too_large",
            )
        return events

    def last(self, index: int, reason: FinishReason, usage: UsageTotal, *, has_calls: bool) -> str:
        events = ""
        if self._open is None and not self._items:
            events += self._open_text(_Message)[1]
        if self._held_logprobs and isinstance(self._open, _Message):
            # Of tokens without a text, such as the last one.
            events += self._write_text("", self._held_logprobs)
        events += self._close("completed" if reason is FinishReason.STOP else "incomplete")
        self._status = _STATUS[reason]
        return events

    def end(self, usage: UsageTotal) -> str:
        is_completed = self._status == "completed"
        kind = "response.completed" if is_completed else "response.incomplete"
        return self._event(kind, response=self.whole(usage))

    def error(self, error: ApiError) -> str:
        # The official client raises what the member `error` says.
        return self._event(
            "error",
            code=json.dumps(error.code),
            message=json.dumps(error.message),
            param=json.dumps(error.param),
            error=json.dumps(json.loads(error.body())["error"]),
        )

    def collect(self, index: int, parts: Sequence[Part], reason: FinishReason) -> None:
        for part in parts:
            self._take(part)
        self.last(index, reason, UsageTotal(), has_calls=False)

    def whole(self, usage: UsageTotal) -> str:
        return self._response(json.dumps(_usage(usage)))

    def _take(self, part: Part) -> str:
        """Adds a part to the items; returns its events."""
        if part.parts:
            return "".join([self._take(each) for each in part.parts])
        # Of the answer's tokens, or of those that may become so.
        logprobs, self._held_logprobs = self._held_logprobs, []
        logprobs += part.logprobs or ()
        self._num_bytes += sum(map(len, part.logprobs or ()))
        if part.num_reasoning_tokens:
            self._num_bytes -= sum(map(len, logprobs[: part.num_reasoning_tokens]))
            del logprobs[: part.num_reasoning_tokens]
        events = self._write_reasoning(part.reasoning) if part.reasoning else ""
        num_written = 0
        for delta in part.tool_calls:
            if text := part.text[num_written : delta.place]:
                events += self._write_text(text, logprobs)
                num_written, logprobs = delta.place, []
            events += self._write_call(delta)
        if text := part.text[num_written:]:
            events += self._write_text(text, logprobs)
        elif part.tool_calls or part.begins_in_call:
            self._num_bytes -= sum(map(len, logprobs))
        else:
            self._held_logprobs = logprobs
        return events

    def _write_reasoning(self, text: str) -> str:
        reasoning, events = self._open_text(_Reasoning)
        reasoning.texts.append(text)
        return events + self._item_event(
            f"{reasoning.event}.delta", reasoning, content_index="0", delta=self._written(text)
        )

    def _write_text(self, text: str, logprobs: Sequence[str]) -> str:
        message, events = self._open_text(_Message)
        message.texts.append(text)
        message.logprobs += logprobs
        return events + self._item_event(
            f"{message.event}.delta",
            message,
            content_index="0",
            delta=self._written(text),
            logprobs=_list(logprobs),
        )

    def _open_text(self, kind: type[_T]) -> tuple[_T, str]:
        """The item of this kind that comes; and the events of its beginning."""
        if isinstance(self._open, kind):
            return self._open, ""
        events = self._close("completed")
        item = kind(f"{kind.prefix}_{secrets.token_hex(12)}")
        self._open = item
        added = self._event(
            "response.output_item.added",
            output_index=str(len(self._items)),
            item=item.item(_IN_PROGRESS),
        )
        part = self._item_event(
            "response.content_part.added", item, content_index="0", part=item.part(**item.written())
        )
        return item, events + added + part

    def _write_call(self, delta: ToolCallDelta) -> str:
        events = ""
        if delta.name is not None:
            events = self._close("completed")
            assert delta.call_id is not None, "a call begins with its id"
            self._open = _Call(f"fc_{secrets.token_hex(12)}", delta.call_id, delta.name)
            events += self._event(
                "response.output_item.added",
                output_index=str(len(self._items)),
                item=self._open.item(_IN_PROGRESS),
            )
        call = self._open
        assert isinstance(call, _Call), "a call goes on"
        if not delta.arguments:
            return events
        call.pieces.append(delta.arguments)
        return events + self._item_event(
            "response.function_call_arguments.delta", call, delta=self._written(delta.arguments)
        )

    def _written(self, text: str) -> str:
        """A text that is kept, as JSON."""
        written = json.dumps(text)
        self._num_bytes += len(written)
        return written

    def _close(self, status: str) -> str:
        """Ends the item that comes, if there is one; returns the events of its end."""
        item = self._open
        if item is None:
            return ""
        # Written once: a text may be long.
        if isinstance(item, _Call):
            arguments = json.dumps("".join(item.pieces))
            written = item.item(status, arguments)
            events = self._item_event(
                "response.function_call_arguments.done",
                item,
                name=json.dumps(item.name),
                arguments=arguments,
            )
        else:
            members = item.written()
            part = item.part(**members)
            written = item.item(status, part)
            events = self._item_event(f"{item.event}.done", item, content_index="0", **members)
            events += self._item_event(
                "response.content_part.done", item, content_index="0", part=part
            )
        events += self._event(
            "response.output_item.done", output_index=str(len(self._items)), item=written
        )
        self._items.append(written)
        self._open = None
        return events

    def _item_event(self, kind: str, item: _Message | _Reasoning | _Call, **members: str) -> str:
        """An event of the item that comes."""
        return self._event(
            kind, item_id=json.dumps(item.id), output_index=str(len(self._items)), **members
        )

    def _event(self, kind: str, **members: str) -> str:
        """A server-sent event; "" if there are none. `members`: as JSON."""
        if not self._is_stream:
            return ""
        number, self._num_events = self._num_events, self._num_events + 1
        data = _object(type=f'"{kind}"', sequence_number=str(number), **members)
        return f"event: {kind}\ndata: {data}\n\n"

    def _response(self, usage: str = "null") -> str:
        is_incomplete = self._status == "incomplete"
        return _object(
            id=json.dumps(self._id),
            object='"response"',
            created_at=str(self._created_at),
            status=json.dumps(self._status),
            error="null",
            incomplete_details='{"reason":"max_output_tokens"}' if is_incomplete else "null",
            instructions="null",
            metadata="{}",
            output=_list(self._items),
            previous_response_id="null",
            store="false",
            tools="[]",
            truncation='"disabled"',
            usage=usage,
            **self._repeated,
        )


def _object(**members: str) -> str:
    """A JSON object. `members`: as JSON."""
    # Copied once: they may be long.
    pieces = [piece for name, value in members.items() for piece in (',"', name, '":', value)]
    pieces[0] = '{"'
    return "".join([*pieces, "}"])


def _list(elements: Sequence[str]) -> str:
    """A JSON list. `elements`: as JSON."""
    return f"[{','.join(elements)}]"


def _usage(total: UsageTotal) -> dict[str, object]:
    usage = total.to_json()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "speculation": usage["speculation"],
    }
