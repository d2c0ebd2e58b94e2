"""Tells the parts of a model's output apart as its text comes: reasoning, calls and the answer.

Owns one state machine for all that is read from a text, and its table: in each place, which tags
are looked for, whether stop strings count, and whether the output has come to where a grammar
begins. However the text is divided, the same is found.

    place          what is read there                      leads on               stop  grammar
    START          white space before all else             <think>: BEGINNING     no    no
                                                           else: OPENING
    BEGINNING      white space behind <think>              else: REASONING        no    no
    REASONING      reasoning                               </think>: SPACE        no    no
                                                           a call's mark:
                                                           POSSIBLE_CALL
    POSSIBLE_CALL  within reasoning, held back: a call if  </think>: SPACE        no    no
                   no </think> follows                     the end: ANSWER
    SPACE          white space behind </think>             else: OPENING          no    yes
    OPENING        before the answer, where a call of a    { or [: CALL           yes   yes
                   form without marks may begin            else: ANSWER
    ANSWER         the answer                              a call's mark: CALL    yes   yes
    CALL           a call, or what may yet become one      its end: BEHIND        no    yes
    BEHIND         white space behind a call, which is     else: ANSWER           no    yes
                   the answer's between two texts

Stop strings count in the text that clients get as the answer, and not in what they do not see, or
see as something else: a model may quote them while it reasons, or in a call's arguments.
"""

import copy
import enum
import re
from collections.abc import Callable, Sequence

from gateway.text.output.call_readers import AnyCallReader, call_reader
from gateway.text.output.parts import Piece, Read, Reading, ReasoningText
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_form import ToolCallForm
from gateway.text.output.tool_call_reader import MAX_UNCERTAIN_CHARACTERS, num_begun
from gateway.text.reasoning import Reasoning

# White space before a tag belongs to it, as far as it is not longer, in characters.
_MAX_SPACE = 256
_OPENINGS = {ToolCallForm.LLAMA3_JSON: "{", ToolCallForm.PYTHONIC: "[{"}
_DIVIDERS = re.compile(r"[;\s}\],]*")


class Place(enum.Enum):
    """Where in the output a text ends. See the table above."""

    START = enum.auto()
    BEGINNING = enum.auto()
    REASONING = enum.auto()
    POSSIBLE_CALL = enum.auto()
    SPACE = enum.auto()
    OPENING = enum.auto()
    ANSWER = enum.auto()
    CALL = enum.auto()
    BEHIND = enum.auto()


class OutputReader:
    """Reads one output, the text of one token after the other.

    Attributes:
        place: where the text so far ends.
        stopped: whether a stop string is complete; then nothing may be fed.
    """

    def __init__(self, reading: Reading, stops: StopStrings) -> None:
        self.place = _FIRST_PLACES[reading.reasoning]
        self.stopped = False
        self._stops = stops
        self._counts_stops = True
        # The tags of reasoning.
        self._begin, self._end = reading.tags.begin, reading.tags.end
        self._tools = reading.tools
        self._form = reading.form if reading.tools else None
        marks = self._form.marks if self._form is not None else None
        # Each stands before a call. Empty: calls have no mark, or there are none.
        begins = () if marks is None else (marks.begin, marks.other_begin)
        self._marks = tuple(filter(None, begins))
        # One of these begins a call without a mark; "": there are none.
        self._openings = "" if self._form is None else _OPENINGS.get(self._form, "")
        # The end of the text, of which it is not known yet what it is.
        self._held = ""
        # Of its first characters, so many begin no call, and so many complete no stop string.
        self._num_plain = 0
        self._num_searched = 0
        self._call: AnyCallReader | None = None
        # The text of a call within reasoning, which `_call` reads, too.
        self._possible: list[str] = []
        self._num_possible = 0
        # Tokens of which it is not known yet whether they are of reasoning; and whether its end tag
        # ended it.
        self._num_undecided = 0
        self._was_closed = False
        self._is_counted = reading.reasoning is Reasoning.NONE
        # Whether any of its text was shown.
        self._has_answer = False
        self._pieces: list[Piece] = []

    def copy(self) -> "OutputReader":
        """An independent one in the same state, which is not within a call."""
        assert self._call is None, "calls are never copied"
        copied = copy.copy(self)
        copied._pieces, copied._possible = [], []
        return copied

    @property
    def _has_begun_call(self) -> bool:
        return self._call is not None and self._call.has_begun

    @property
    def num_held(self) -> int:
        """How many of the last characters are not told yet, since it is not known what they are."""
        num_held = len(self._held) + self._num_possible
        if self._call is None or self._num_possible:
            return num_held
        return num_held + self._call.num_held

    def feed(self, text: str, *, counts_stops: bool = True) -> Read:
        """Reads the text of the next token.

        Args:
            counts_stops: whether a stop string that it completes ends the output.
        """
        self._counts_stops = counts_stops
        begins_in_call = self.place is Place.CALL and self._has_begun_call
        self._read(text)
        num_reasoning_tokens = 0
        if not self._is_counted:
            self._num_undecided += 1
            num_reasoning_tokens = self._count_reasoning()
        return Read(self._take(), num_reasoning_tokens, begins_in_call)

    def finish(self, tail: str = "") -> Read:
        """Ends the text: what was held back.

        Args:
            tail: the last of it, which no token brings.
        """
        num_reasoning_tokens = 0
        self._read(tail)
        if self.place is Place.POSSIBLE_CALL:
            assert self._call is not None, "it reads the call"
            if self._call.has_begun:
                # No end of the reasoning follows the call, so that ended before it.
                self._held = self._end_possible_call(Place.ANSWER).lstrip()
            else:
                self._held = self._end_possible_call(Place.REASONING)
        if self.place is Place.REASONING:
            self._show_reasoning(self._held)
            self._held = ""
            num_reasoning_tokens = self._num_undecided
        if self.place in (Place.START, Place.OPENING):
            self.place = Place.ANSWER
        self._read("")
        if self.place is Place.CALL:
            assert self._call is not None, "it reads the call"
            self._call.finish()
            self._read(self._end_call())
        if not self.stopped:
            self._show_answer("" if self.place is Place.BEHIND else self._held)
            self._held = ""
        return Read(self._take(), num_reasoning_tokens)

    def _take(self) -> Sequence[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _count_reasoning(self) -> int:
        """How many tokens have become known to be of reasoning."""
        if self.place in (Place.START, Place.POSSIBLE_CALL):
            return 0
        if self.place in (Place.BEGINNING, Place.REASONING):
            if self._num_begun_mark(self._held):
                return 0
        else:
            self._is_counted = True
            if not self._was_closed:
                return 0
        num_tokens, self._num_undecided = self._num_undecided, 0
        return num_tokens

    def _read(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text and not self.stopped:
            text = _READERS[self.place](self, text)

    # Each reads some of a text and returns the rest, which is read in the place that there is then;
    # "": there is none, or it is held back.

    def _read_start(self, text: str) -> str:
        begun = text.lstrip()
        if len(text) - len(begun) <= _MAX_SPACE:
            if begun.startswith(self._begin):
                self.place = Place.BEGINNING
                return begun.removeprefix(self._begin)
            if self._begin.startswith(begun):
                self._held = text
                return ""
        self.place = Place.OPENING
        return text

    def _read_beginning(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self.place = Place.REASONING
        return text

    def _read_reasoning(self, text: str) -> str:
        end = text.find(self._end)
        begin, behind = self._find_mark(text)
        if end >= 0 and not 0 <= begin < end:
            self._show_reasoning(text[: _before_space(text, end)])
            self._close_reasoning()
            return text[end + len(self._end) :]
        if begin >= 0:
            first = _before_space(text, begin)
            self._show_reasoning(text[:first])
            self.place, self._num_plain = Place.POSSIBLE_CALL, 0
            self._call = call_reader(self._form, self._tools, text[first:behind])
            self._possible, self._num_possible = [text[first:behind]], behind - first
            return text[behind:]
        of_mark = self._num_begun_mark(text[self._num_plain :])
        first = _before_space(text, len(text) - max(num_begun(text, self._end), of_mark))
        self._show_reasoning(text[:first])
        self._hold(text, first)
        return ""

    def _read_possible_call(self, text: str) -> str:
        assert self._call is not None, "it reads the call"
        text, rest = (
            text[: MAX_UNCERTAIN_CHARACTERS - self._num_possible],
            text[MAX_UNCERTAIN_CHARACTERS - self._num_possible :],
        )
        self._possible.append(text)
        self._num_possible += len(text)
        if self._end in "".join(self._possible[-len(self._end) :]):
            held = self._end_possible_call(Place.REASONING)
            end = held.index(self._end)
            self._show_reasoning(held[: _before_space(held, end)])
            self._close_reasoning()
            return held[end + len(self._end) :] + rest
        unread = "" if self._call.is_over else self._call.feed(text)
        if self._call.is_over and not self._call.has_begun:
            # The tag was only mentioned.
            held = self._end_possible_call(Place.REASONING)
            self._num_plain = len(held) - len(unread)
            return held + rest
        if self._num_possible >= MAX_UNCERTAIN_CHARACTERS:
            return self._end_possible_call(Place.ANSWER).lstrip() + rest
        return ""

    def _read_space(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self.place = Place.OPENING
        return text

    def _read_opening(self, text: str) -> str:
        begun = text.lstrip()
        num_space = len(text) - len(begun)
        if self._openings and num_space <= _MAX_SPACE:
            if not begun:
                self._held = text
                return ""
            if begun[0] in self._openings:
                self._begin_call(text[:num_space], begun[0])
                return begun
        self.place = Place.ANSWER
        return text

    def _read_answer(self, text: str) -> str:
        begin, behind = self._find_mark(text)
        if self._counts_stops and (stop := self._stops.find(text, self._num_searched, behind)):
            self.stopped = True
            self._show_answer(text[: stop.start])
            self._held = text[stop.start :]
            return ""
        if begin >= 0:
            first = _before_space(text, begin)
            self._show_answer(text[:first])
            self._begin_call(text[first:behind])
            return text[behind:]
        first = len(text) - self._stops.num_begun(text)
        if self._marks:
            of_mark = self._num_begun_mark(text[self._num_plain :])
            first = min(first, _before_space(text, len(text) - of_mark))
        self._show_answer(text[:first])
        self._hold(text, first)
        self._num_searched = len(text) - first
        return ""

    def _read_call(self, text: str) -> str:
        assert self._call is not None, "it reads the call"
        rest = self._call.feed(text)
        self._pieces += self._call.take()
        return self._end_call() + rest if self._call.is_over else ""

    def _read_behind(self, text: str) -> str:
        if self._openings:
            begun = _DIVIDERS.sub("", text, count=1)
            if begun and begun[0] in self._openings:
                self._begin_call("", begun[0])
                return begun
            text = begun
        elif not self._has_answer:
            text = text.lstrip()
        elif len(text) <= _MAX_SPACE and not text.strip():
            # Between two texts it is the answer's.
            self._held = text
            return ""
        if text:
            self.place = Place.ANSWER
        return text

    def _find_mark(self, text: str) -> tuple[int, int]:
        """Where the first call's mark begins and ends; -1 and the text's end: there is none."""
        found = [(text.find(mark, self._num_plain), mark) for mark in self._marks]
        begin, mark = min((each for each in found if each[0] >= 0), default=(-1, ""))
        return begin, len(text) if begin < 0 else begin + len(mark)

    def _num_begun_mark(self, text: str) -> int:
        """How many of the text's last characters may begin a call's mark."""
        return max((num_begun(text, mark) for mark in self._marks), default=0)

    def _begin_call(self, before: str, opening: str = "") -> None:
        self.place, self._num_plain, self._num_searched = Place.CALL, 0, 0
        self._call = call_reader(self._form, self._tools, before, opening)

    def _end_call(self) -> str:
        """Returns its text, if it was none."""
        assert self._call is not None, "it ends"
        call, self._call = self._call, None
        self._pieces += call.take()
        self.place = Place.BEHIND if call.has_begun else Place.ANSWER
        text = call.rest()
        self._num_plain = len(text)
        return text

    def _end_possible_call(self, place: Place) -> str:
        """Returns its text."""
        held = "".join(self._possible)
        self._possible, self._num_possible, self._call = [], 0, None
        self.place = place
        return held

    def _close_reasoning(self) -> None:
        self.place, self._num_plain, self._was_closed = Place.SPACE, 0, True

    def _hold(self, text: str, first: int) -> None:
        self._held = text[first:]
        self._num_plain = max(0, self._num_plain - first)

    def _show_reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(ReasoningText(text))

    def _show_answer(self, text: str) -> None:
        if text:
            self._has_answer = True
            self._pieces.append(text)


_FIRST_PLACES = {
    Reasoning.NONE: Place.OPENING,
    Reasoning.MAY_BEGIN: Place.START,
    Reasoning.HAS_BEGUN: Place.BEGINNING,
    Reasoning.IS_OVER: Place.START,
}
_READERS: dict[Place, Callable[[OutputReader, str], str]] = {
    Place.START: OutputReader._read_start,
    Place.BEGINNING: OutputReader._read_beginning,
    Place.REASONING: OutputReader._read_reasoning,
    Place.POSSIBLE_CALL: OutputReader._read_possible_call,
    Place.SPACE: OutputReader._read_space,
    Place.OPENING: OutputReader._read_opening,
    Place.ANSWER: OutputReader._read_answer,
    Place.CALL: OutputReader._read_call,
    Place.BEHIND: OutputReader._read_behind,
}


def _before_space(text: str, end: int) -> int:
    """Where the white space before a place begins, as far as it belongs to what comes there."""
    return max(len(text[:end].rstrip()), end - _MAX_SPACE)
