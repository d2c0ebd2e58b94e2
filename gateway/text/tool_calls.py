"""Tool calls in a model's text, as the text comes.

Owns the forms in which models write calls, and which text is a call. A call is shown once it is
complete, so that one that is no JSON, or names no given tool, stays text.

    HERMES        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>    after any text
    LLAMA3_JSON   {"name": "f", "parameters": {"x": 1}}; {...}                   the whole text
"""

import enum
import json
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

# A longer one is text: until it is complete, it is kept and searched.
_MAX_CALL_CHARACTERS = 1 << 16

_BEGIN, _END = "<tool_call>", "</tool_call>"


class ToolCallForm(enum.Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"

    @property
    def arguments_key(self) -> str:
        """The key of a call's arguments."""
        return "arguments" if self is ToolCallForm.HERMES else "parameters"


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        arguments: a JSON object.
    """

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What became final with some text: the text that belongs to no call, and the calls."""

    text: str
    calls: list[ToolCall]


class ToolCallParser(Protocol):
    """Finds the calls of one output. How the text is divided does not change what is found."""

    def feed(self, text: str) -> Parsed:
        """Appends the text's next piece."""

    def finish(self) -> Parsed:
        """Ends the text: shows what was held back."""


def make_parser(form: ToolCallForm, names: Collection[str]) -> ToolCallParser:
    """A new parser for one output.

    Args:
        names: of the tools that may be called.
    """
    return HermesParser(names) if form is ToolCallForm.HERMES else Llama3Parser(names)


def form_of_template(source: str) -> ToolCallForm | None:
    """The form that a chat template teaches its model; None: none that is known."""
    if _BEGIN in source:
        # Some models write XML between the same tags.
        return None if "<function=" in source else ToolCallForm.HERMES
    if '"parameters"' in source and ("ipython" in source or "python_tag" in source):
        return ToolCallForm.LLAMA3_JSON
    return None


class HermesParser:
    """Calls between tags; white space around a call belongs to it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Text that may yet belong to a call: white space and the beginning of a tag, or, in a
        # call, all of it.
        self._held = ""
        self._is_in_call = False
        self._is_after_call = False

    def feed(self, text: str) -> Parsed:
        self._held += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        while self._read_call(shown, calls) if self._is_in_call else self._read_text(shown):
            pass
        return Parsed("".join(shown), calls)

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        if self._is_in_call:
            # Some models end without the last tag.
            call = _call(held, self._names)
            if call is not None:
                return Parsed("", [call])
        if self._is_after_call and not held.strip():
            return Parsed("", [])
        return Parsed(held, [])

    def _read_text(self, shown: list[str]) -> bool:
        """Shows text up to the next call; returns whether one begins."""
        if self._is_after_call:
            self._held = self._held.lstrip()
        begin = self._held.find(_BEGIN)
        if begin >= 0:
            text = self._held[:begin].rstrip()
            self._held = self._held[len(text) :]
            self._is_in_call = True
        else:
            end = len(self._held) - _length_of_tag_at_end(self._held)
            text = self._held[:end].rstrip()
            self._held = self._held[len(text) :]
            if len(self._held) > _MAX_CALL_CHARACTERS:
                text, self._held = text + self._held, ""
        if text:
            self._is_after_call = False
            shown.append(text)
        return self._is_in_call

    def _read_call(self, shown: list[str], calls: list[ToolCall]) -> bool:
        """Shows a call that is complete; returns whether it was."""
        end = self._held.find(_END, 0, _MAX_CALL_CHARACTERS)
        if end < 0 and len(self._held) < _MAX_CALL_CHARACTERS:
            return False
        end = _MAX_CALL_CHARACTERS if end < 0 else end + len(_END)
        whole, self._held = self._held[:end], self._held[end:]
        self._is_in_call = False
        call = _call(whole, self._names)
        if call is None:
            shown.append(whole)
        else:
            calls.append(call)
        self._is_after_call = call is not None
        return True


class Llama3Parser:
    """A text that is nothing but calls, divided by semicolons."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text, [])
        self._held += text
        start = self._held.lstrip()
        self._is_text = bool(start and not start.startswith("{"))
        if self._is_text or len(self._held) > _MAX_CALL_CHARACTERS:
            self._is_text = True
            held, self._held = self._held, ""
            return Parsed(held, [])
        return Parsed("", [])

    def finish(self) -> Parsed:
        held, self._held = self._held, ""
        calls: list[ToolCall] = []
        rest = held.strip()
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
                calls.append(_to_call(value, ToolCallForm.LLAMA3_JSON, self._names))
            except (ValueError, RecursionError):
                return Parsed(held, [])
            rest = rest[end:].lstrip("; \t\r\n")
        return Parsed("" if calls else held, calls)


def _call(tagged: str, names: Collection[str]) -> ToolCall | None:
    body = tagged.strip().removeprefix(_BEGIN).removesuffix(_END)
    try:
        return _to_call(_DECODER.decode(body), ToolCallForm.HERMES, names)
    except (ValueError, RecursionError):
        return None


def _to_call(value: Any, form: ToolCallForm, names: Collection[str]) -> ToolCall:
    """Reads a call.

    Raises:
        ValueError: it is none.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise ValueError("no call of a given tool")
    arguments = value.get(form.arguments_key, {})
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    # A number such as 1e999 is read as infinite, which JSON cannot say.
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair is no text.
    written.encode()
    return ToolCall(name, written)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Of JSON alone: Python's own reads NaN, too.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _length_of_tag_at_end(text: str) -> int:
    """How many of the last characters may begin a call's tag."""
    for length in range(min(len(text), len(_BEGIN) - 1), 0, -1):
        if _BEGIN.startswith(text[-length:]):
            return length
    return 0
