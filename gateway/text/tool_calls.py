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

# White space before a call belongs to it, as far as it is not longer.
_MAX_SPACE = 1 << 8
# More of them in one call's strings are not looked past: each costs reading the call once more.
_MAX_ENDS = 16

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
        # call, all of it. It is joined only where something may end.
        self._pieces: list[str] = []
        self._num_held = 0
        self._held = ""
        # The last characters, in which an end tag may begin.
        self._tail = ""
        # Where end tags end that are within strings of the call.
        self._ends: list[int] = []
        self._is_in_call = False
        self._is_after_call = False

    def feed(self, text: str) -> Parsed:
        self._pieces.append(text)
        self._num_held += len(text)
        self._tail += text
        shown: list[str] = []
        calls: list[ToolCall] = []
        is_long = self._num_held >= _MAX_CALL_CHARACTERS
        if not self._is_in_call or is_long or _END in self._tail:
            self._read(shown, calls)
        self._tail = self._tail[1 - len(_END) :]
        return Parsed("".join(shown), calls)

    def finish(self) -> Parsed:
        shown: list[str] = []
        calls: list[ToolCall] = []
        self._read(shown, calls)
        while self._is_in_call:
            # Some models end without the last tag.
            self._end_call(len(self._held), _call(self._held, self._names), shown, calls)
            self._pieces = [self._held]
            self._read(shown, calls)
        held, self._held, self._pieces = self._held, "", []
        if not self._is_after_call or held.strip():
            shown.append(held)
        return Parsed("".join(shown), calls)

    def _read(self, shown: list[str], calls: list[ToolCall]) -> None:
        """Shows what is final of what is held."""
        self._held = "".join(self._pieces)
        while self._read_call(shown, calls) if self._is_in_call else self._read_text(shown):
            pass
        self._pieces = [self._held]
        self._num_held = len(self._held)

    def _read_text(self, shown: list[str]) -> bool:
        """Shows text up to the next call; returns whether one begins."""
        if self._is_after_call:
            self._held = self._held.lstrip()
        begin = self._held.find(_BEGIN)
        self._is_in_call = begin >= 0
        end = begin if begin >= 0 else len(self._held) - _length_of_tag_at_end(self._held)
        end = max(len(self._held[:end].rstrip()), end - _MAX_SPACE)
        text, self._held = self._held[:end], self._held[end:]
        if text:
            self._is_after_call = False
            shown.append(text)
        return self._is_in_call

    def _read_call(self, shown: list[str], calls: list[ToolCall]) -> bool:
        """Shows a call that is complete; returns whether it was."""
        while True:
            start = self._ends[-1] if self._ends else 0
            end = self._held.find(_END, start, _MAX_CALL_CHARACTERS)
            if end < 0:
                if len(self._held) < _MAX_CALL_CHARACTERS:
                    return False
                self._end_call(_MAX_CALL_CHARACTERS, None, shown, calls)
                return True
            end += len(_END)
            whole = self._held[:end]
            call = _call(whole, self._names)
            if call is None and len(self._ends) < _MAX_ENDS and _ends_in_string(whole):
                self._ends.append(end)
                continue
            self._end_call(end, call, shown, calls)
            return True

    def _end_call(
        self, end: int, call: ToolCall | None, shown: list[str], calls: list[ToolCall]
    ) -> None:
        """Shows what is held up to there, or, if it is no call, up to the first end tag.

        Behind that, calls may begin; few characters are read again, since what is within a string
        for one call is not for the next.
        """
        if call is None:
            end = self._ends[0] if self._ends else end
            shown.append(self._held[:end])
        else:
            calls.append(call)
        self._held = self._held[end:]
        self._ends = []
        self._is_in_call = False
        self._is_after_call = call is not None


class Llama3Parser:
    """A text that is nothing but calls, divided by semicolons."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._pieces: list[str] = []
        self._num_held = 0
        self._has_begun = False
        self._is_text = False

    def feed(self, text: str) -> Parsed:
        if self._is_text:
            return Parsed(text, [])
        self._pieces.append(text)
        self._num_held += len(text)
        if not self._has_begun:
            start = text.lstrip()
            self._has_begun = bool(start)
            self._is_text = self._has_begun and not start.startswith("{")
        if self._is_text or self._num_held > _MAX_CALL_CHARACTERS:
            self._is_text = True
            held, self._pieces = "".join(self._pieces), []
            return Parsed(held, [])
        return Parsed("", [])

    def finish(self) -> Parsed:
        held, self._pieces = "".join(self._pieces), []
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
    try:
        return _to_call(_DECODER.decode(_body(tagged)), ToolCallForm.HERMES, names)
    except (ValueError, RecursionError):
        return None


def _ends_in_string(tagged: str) -> bool:
    """Whether the text is the beginning of JSON, and its last tag within a string."""
    try:
        _DECODER.decode(_body(tagged))
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _body(tagged: str) -> str:
    return tagged.strip().removeprefix(_BEGIN).removesuffix(_END)


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
