"""Tool calls with marks around their parts, as their text comes: see `tool_call_form.py`.

Owns from where on a text is a call for certain: once it has named a given tool. Nothing takes that
back: from then on, all that the model writes up to the call's end belongs to it. Arguments that are
texts are shown as they come, others when they are whole. However the text is divided, the same is
found: what depends on the characters behind it waits for them, and no mark is longer than
`_MAX_MARK` characters.
"""

import enum
import json

from gateway.text.output.argument_values import Parameters, is_text, value_of
from gateway.text.output.json_mender import JsonMender
from gateway.text.output.pythonic_call_reader import PythonicCallReader
from gateway.text.output.tool_call_form import Marks
from gateway.text.output.tool_call_reader import CallDelta, CallReader, joined, num_begun

_MAX_MARK = 640


class _Place(enum.Enum):
    NAME = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    JSON = enum.auto()


class MarkedCallReader:
    """Reads the calls between two tags; as `CallReader`."""

    def __init__(self, marks: Marks, tools: Parameters, before: str) -> None:
        """Args:
        tools: those that may be called, with their parameters.
        before: what was read already, and is text if this is no call.
        """
        assert marks.name is not None or marks.is_python, "others are JSON"
        self.is_over = False
        self.has_begun = False
        self._marks, self._name_mark = marks, marks.name
        self._tools = tools
        self._before = before
        self._place = _Place.NAME
        # What is not read yet.
        self._text = ""
        self._deltas: list[CallDelta] = []
        # Reads calls in JSON, or in Python.
        self._other: CallReader | PythonicCallReader | None = None
        self._mender: JsonMender | None = None
        self._is_quoted = False
        # Of the call that is open: its tool, whether it is a given one, how many arguments it has;
        # of the argument: its name, and what is known of its value.
        self._name = ""
        self._is_given = False
        self._num_arguments = 0
        self._key = ""
        self._value: list[str] = []
        self._is_text = False
        self._begins_value = False

    @property
    def num_held(self) -> int:
        """How many characters of the text may yet be no call, or something else of it."""
        if self._other is not None:
            return self._other.num_held
        return len(self._before) + len(self._text)

    def feed(self, text: str) -> str:
        """Reads on; returns what was not read, once it is over."""
        if self._other is None:
            text = self._read(text)
        if self._other is not None:
            text = self._other.feed(text)
            self.is_over, self.has_begun = self._other.is_over, self._other.has_begun
        return text

    def _read(self, text: str) -> str:
        """Returns what was not read, once it is over or another reads on."""
        self._text += text
        while self._text and not self.is_over and self._other is None and self._step():
            pass
        if self._other is None and not self.is_over:
            return ""
        rest, self._text = self._text, ""
        return rest

    def finish(self) -> None:
        """The text is over: the call is whole, or cut."""
        if self._other is not None:
            self._other.finish()
            self.has_begun = self._other.has_begun
        elif self._place in (_Place.VALUE, _Place.KEY):
            self._finish_arguments()
        elif self._mender is not None:
            if self._is_quoted:
                self._read_quoted(self._mender, is_all=True)
            self._mender.flush()
            self._show(self._mender.take())
        if self.has_begun and self._marks.end.startswith(self._text.strip()):
            self._text = ""
        self.is_over = True

    def _finish_arguments(self) -> None:
        while self._place is _Place.VALUE and self._text and self._read_value(is_all=True):
            pass
        if self._place is _Place.VALUE:
            self._take_value(self._text, is_whole=False)
        else:
            # None is open.
            self._show("}" if self._num_arguments else "{}")
        self._text = ""

    def take(self) -> list[CallDelta]:
        """What came since the last time; a piece of arguments is whole."""
        if self._other is not None:
            return self._other.take()
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    def rest(self) -> str:
        """The text, if it is no call, or what follows calls; of one that is over."""
        return self._other.rest() if self._other is not None else self._before + self._text

    def _step(self) -> bool:
        """Reads some of the text. False: that depends on what follows."""
        if self._place is _Place.NAME:
            return self._read_name()
        if self._place is _Place.KEY:
            return self._read_key()
        return self._read_value() if self._place is _Place.VALUE else self._read_json()

    def _read_name(self) -> bool:
        text, marks = self._text, self._marks
        begun = text.lstrip()
        if self.has_begun:
            if marks.call_end is not None and (found := marks.call_end.match(text)):
                self._text = text[found.end() :]
                return True
            if not marks.end:
                self.is_over = True
                return True
            if begun.startswith(marks.end):
                self._text, self.is_over = begun.removeprefix(marks.end), True
                return True
        elif begun and (begun[0] in "{[" or marks.is_python):
            before = self._before + text[: len(text) - len(begun)]
            if begun[0] in "{[":
                self._other = CallReader(self._tools, before, tags=(marks.begin, marks.end))
            else:
                self._other = PythonicCallReader(self._tools, before, end=marks.end)
            self._text = begun
            return True
        if self._name_mark is not None and (found := self._name_mark.match(text)):
            name = next(filter(None, found.groups()))
            self._is_given = name in self._tools
            if self._is_given or self.has_begun:
                self._begin_call(name, text[found.end() :])
            else:
                self.is_over = True
            return True
        self.is_over = len(text) >= _MAX_MARK or (bool(marks.end) and marks.end in text)
        return self.is_over

    def _begin_call(self, name: str, rest: str) -> None:
        self.has_begun = True
        self._before, self._text = "", rest
        self._name, self._num_arguments = name, 0
        if self._is_given:
            self._deltas.append(CallDelta(name, ""))
        self._place = _Place.JSON if self._marks.key is None else _Place.KEY

    def _read_key(self) -> bool:
        text, marks = self._text, self._marks
        assert marks.key is not None, "there are keys"
        if found := marks.key.match(text):
            self._key = found[1].strip()
            schema = self._tools.get(self._name, {}).get(self._key)
            self._is_text, self._begins_value, self._value = is_text(schema), True, []
            opening = ", " if self._num_arguments else "{"
            self._show(f"{opening}{json.dumps(self._key, ensure_ascii=False)}: ")
            self._num_arguments += 1
            self._text, self._place = text[found.end() :], _Place.VALUE
            return True
        begun = text.lstrip()
        is_ended = begun.startswith(marks.end)
        if is_ended or (marks.call_end is not None and marks.call_end.match(text)):
            # The mark itself is read behind the call.
            self._show("}" if self._num_arguments else "{}")
            self._place = _Place.NAME
            return True
        may_begin = any(begun.startswith(each) or each.startswith(begun) for each in marks.openings)
        if may_begin and len(text) < _MAX_MARK:
            return False
        # Nothing that belongs here.
        mark = text.find("<", len(text) - len(begun) + 1)
        self._text = text[mark:] if mark >= 0 else ""
        return mark >= 0

    def _read_value(self, *, is_all: bool = False) -> bool:
        """Args:
        is_all: whether nothing follows.
        """
        text = self._text
        found = [(text.find(end), end) for end in self._marks.value_ends]
        start, end = min((each for each in found if each[0] >= 0), default=(-1, ""))
        if start < 0:
            # What may begin an end, with the line's end before it.
            self._show_value(len(text) - max(map(len, self._marks.value_ends)))
            return False
        own_end = next(iter(self._marks.value_ends))
        behind = text[start + len(end) :].lstrip()
        following = self._marks.value_ends[end]
        if len(text) - start - len(end) - len(behind) > _MAX_MARK:
            # So much white space stands within a value.
            following = ()
        may_follow = any(each.startswith(behind) for each in following)
        if any(behind.startswith(each) for each in following) or (is_all and may_follow):
            self._take_value(text[:start], is_whole=True)
            # Another end is also read as what it is.
            self._text = text[start + len(end) * (end == own_end) :]
            self._place = _Place.KEY
            return True
        if may_follow:
            self._show_value(start - 1)
            return False
        # It is the value's.
        self._show_value(start + len(end))
        return True

    def _show_value(self, end: int) -> None:
        """Shows the value up to a place in the text."""
        if end > 0:
            self._take_value(self._text[:end], is_whole=False)
            self._text = self._text[end:]

    def _take_value(self, text: str, *, is_whole: bool) -> None:
        """Takes in what comes of a value."""
        if self._begins_value and text:
            text = text[self._marks.has_lines and text[0] == "\n" :]
            self._begins_value = False
            if self._is_text:
                self._show('"')
        if is_whole and self._marks.has_lines:
            text = text.removesuffix("\n")
        if not self._is_text:
            self._value.append(text)
            if is_whole:
                schema = self._tools.get(self._name, {}).get(self._key)
                self._show(value_of("".join(self._value), schema))
            return
        self._show(json.dumps(text, ensure_ascii=False)[1:-1])
        if is_whole:
            self._show('""' if self._begins_value else '"')

    def _read_json(self) -> bool:
        if self._mender is None:
            text = self._text.lstrip()
            self._text = text
            if not text:
                return False
            if text[0] != "{":
                self._show("{}")
                self._place = _Place.NAME
                return True
            self._mender = JsonMender()
        text, mender, quote = self._text, self._mender, self._marks.quote
        if self._is_quoted:
            return self._read_quoted(mender)
        if quote and text.startswith(quote):
            self._is_quoted, self._text = True, text.removeprefix(quote)
            mender.feed('"')
            return True
        if text[0] == "<" and not mender.is_in_string:
            ends = self._marks.end, self._marks.call_end
            assert ends[0], "it begins like them"
            if text.startswith(ends[0]) or (ends[1] is not None and ends[1].match(text)):
                mender.close()
                self._text = ""
            elif len(text) < _MAX_MARK:
                return False
        rest = mender.feed(self._text, is_plain=True) if self._text else text
        self._show(mender.take())
        is_stuck = len(rest) == len(text) and not mender.is_complete
        self._text = rest
        if mender.is_complete:
            self._mender, self._place = None, _Place.NAME
        return not is_stuck

    def _read_quoted(self, mender: JsonMender, *, is_all: bool = False) -> bool:
        """Reads a string up to the form's own quote, whatever is in it.

        Args:
            is_all: whether nothing follows.
        """
        quote = self._marks.quote
        end = self._text.find(quote)
        is_whole = end >= 0
        if not is_whole:
            end = len(self._text) - (0 if is_all else num_begun(self._text, quote))
        text = json.dumps(self._text[:end], ensure_ascii=False)[1:-1]
        self._text = self._text[end:].removeprefix(quote)
        while text:
            text = mender.feed(text, is_plain=text[0] == "<")
        if is_whole:
            self._is_quoted = False
            mender.feed('"')
        self._show(mender.take())
        return is_whole

    def _show(self, text: str) -> None:
        if text and self._is_given:
            self._deltas.append(CallDelta(None, text))
