"""Tool calls in a model's text, as the text comes.

Owns the forms in which models write calls, and what between them belongs to no call. A call is
shown while it comes, from where on it is one for certain (`tool_call_reader.py`); what is none
stays text, to the last character. Behind a mistake in a call the text goes on as text.

    HERMES        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>    after any text
    LLAMA3_JSON   {"name": "f", "parameters": {"x": 1}}; {...}                   from the beginning

In both, the arguments are the first object that is called `arguments` or `parameters`.
"""

import enum
import re
from collections.abc import Collection
from typing import NamedTuple

from gateway.text.tool_call_reader import CallDelta, CallReader

# White space before a call belongs to it, as far as it is not longer.
_MAX_SPACE = 1 << 8
_SPACE = re.compile(r"\s*")
_DIVIDERS = re.compile(r"[;\s]*")

_BEGIN, _END = "<tool_call>", "</tool_call>"
#: Of all forms. A tokenizer may say that they are special, but calls are found by their text.
TAGS = (_BEGIN, _END)


class ToolCallForm(enum.Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"

    @property
    def arguments_key(self) -> str:
        """The key of a call's arguments, as templates teach it; the other one is read, too."""
        return "arguments" if self is ToolCallForm.HERMES else "parameters"


class Parsed(NamedTuple):
    """What became final with some text.

    Attributes:
        pieces: in the text's order; a text belongs to no call.
    """

    pieces: list[str | CallDelta]

    @property
    def text(self) -> str:
        return "".join([each for each in self.pieces if isinstance(each, str)])

    @property
    def calls(self) -> list[CallDelta]:
        return [each for each in self.pieces if not isinstance(each, str)]


class ToolCallParser:
    """Finds the calls of one output. How the text is divided does not change what is found.

    A subclass knows what may stand between the calls of its form.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Outside of calls: what may yet belong to one.
        self._held = ""
        self._reader: CallReader | None = None
        self._is_after_call = False

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._reader is not None and self._reader.has_begun

    def feed(self, text: str) -> Parsed:
        """Appends the text's next piece."""
        shown: list[str | CallDelta] = []
        place = 0
        while place < len(text):
            if self._reader is None:
                place = self._read_text(text, place, shown)
                continue
            place = self._reader.feed(text, place)
            shown += self._reader.take()
            if self._reader.is_over:
                self._end_call(shown)
        return Parsed(shown)

    def finish(self) -> Parsed:
        """Ends the text: shows what was held back."""
        shown: list[str | CallDelta] = []
        if self._reader is not None:
            self._end_call(shown)
        shown.append(self._held)
        self._held = ""
        return Parsed(shown)

    def _read_text(self, text: str, start: int, shown: list[str | CallDelta]) -> int:
        """Reads up to the next call, if there is one; returns where to go on."""
        raise NotImplementedError

    def _end_call(self, shown: list[str | CallDelta]) -> None:
        assert self._reader is not None, "a call ends"
        self._is_after_call = self._reader.has_begun
        shown.append(self._reader.rest())
        self._reader = None


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


class HermesParser(ToolCallParser):
    """Calls between tags; white space around a call belongs to it."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_end_tag_due = False

    @property
    def is_in_call(self) -> bool:
        return super().is_in_call or self._is_end_tag_due

    def feed(self, text: str) -> Parsed:
        # White space, and the beginning of a tag.
        held, self._held = self._held, ""
        return super().feed(held + text)

    def finish(self) -> Parsed:
        if self._is_end_tag_due:
            # It is cut, or does not come at all.
            self._held = ""
        return super().finish()

    def _read_text(self, text: str, start: int, shown: list[str | CallDelta]) -> int:
        if self._is_after_call:
            start = _end_of_space(text, start)
            if self._is_end_tag_due:
                tag = text[start : start + len(_END)]
                if tag != _END and _END.startswith(tag):
                    self._held = tag
                    return len(text)
                self._is_end_tag_due = False
                if tag == _END:
                    start = _end_of_space(text, start + len(_END))
        begin = text.find(_BEGIN, start)
        end = begin if begin >= 0 else len(text) - _length_of_tag_at_end(text[start:])
        is_call = begin >= 0
        end = max(start + len(text[start:end].rstrip()), end - _MAX_SPACE)
        if end > start:
            shown.append(text[start:end])
            self._is_after_call = False
        if not is_call:
            self._held = text[end:]
            return len(text)
        begin += len(_BEGIN)
        self._reader = CallReader(self._names, text[end:begin])
        return begin

    def _end_call(self, shown: list[str | CallDelta]) -> None:
        super()._end_call(shown)
        self._is_end_tag_due = self._is_after_call


class Llama3Parser(ToolCallParser):
    """A text that begins with calls, divided by semicolons; behind other text there are none."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_text = False

    def _read_text(self, text: str, start: int, shown: list[str | CallDelta]) -> int:
        if self._is_text:
            shown.append(text[start:])
            return len(text)
        if self._is_after_call:
            begin = _end_of_space(text, start, _DIVIDERS)
        else:
            begin = _end_of_space(text, start)
            self._held += text[start:begin]
        if begin < len(text) or len(self._held) > _MAX_SPACE:
            held, self._held = self._held, ""
            if text[begin : begin + 1] == "{" and len(held) <= _MAX_SPACE:
                self._reader = CallReader(self._names, held)
            else:
                self._is_text = True
                shown.append(held)
        return begin

    def _end_call(self, shown: list[str | CallDelta]) -> None:
        super()._end_call(shown)
        self._is_text = not self._is_after_call


def _end_of_space(text: str, start: int, space: re.Pattern[str] = _SPACE) -> int:
    found = space.match(text, start)
    assert found is not None, "matches nothing, too"
    return found.end()


def _length_of_tag_at_end(text: str) -> int:
    """How many of the last characters may begin a call's tag."""
    for length in range(min(len(text), len(_BEGIN) - 1), 0, -1):
        if _BEGIN.startswith(text[-length:]):
            return length
    return 0
