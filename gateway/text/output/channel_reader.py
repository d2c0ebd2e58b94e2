"""Tells the messages of an output apart that a model writes in channels, as GPT-OSS does.

    <|channel|>analysis<|message|>text<|end|><|start|>assistant<|channel|>final<|message|>text

A message has a header and a text, which ends at the next tag. Headers are shown to nobody. What a
header says decides what its text is: with a recipient `to=functions.NAME` that is a given tool, the
arguments of a call; with any other recipient, or in `analysis`, reasoning; else the answer, of
which there may be several texts. An output without a header is the answer. However the text is
divided, the same is found.

Format: https://github.com/openai/harmony.
"""

import copy
import enum
import re
from collections.abc import Sequence

from gateway.text.output.json_mender import JsonMender
from gateway.text.output.parts import Piece, Read, Reading, ReasoningText
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_reader import CallDelta

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")

#: Which must be shown where a tokenizer says that they are special. The others end outputs.
TAGS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>")

# Of a message's text; a header may lack its `<|start|>`.
_END = re.compile("|".join(map(re.escape, (*_ENDS, _START, _CHANNEL))))
_LONGEST_TAG = len(_CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAMESPACE = "functions."
_IN_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_MAX_HEADER = 512
# One of these begins every header.
_HEADERS = (_START, _CHANNEL, "<|constrain|>", *_ENDS, "to=")


def is_taught(source: str) -> bool:
    """Whether a chat template writes messages in channels."""
    return _CHANNEL in source and _MESSAGE in source


class _Place(enum.Enum):
    HEADER = enum.auto()
    REASONING = enum.auto()
    ANSWER = enum.auto()
    CALL = enum.auto()


class ChannelReader:
    """Reads one output, the text of one token after the other; as `OutputReader`."""

    def __init__(self, reading: Reading, stops: StopStrings) -> None:
        self.stopped = False
        self._names = reading.tools
        self._stops = stops
        self._counts_stops = True
        self._place = _Place.HEADER
        # The end of the text, of which it is not known yet what it is; and of how many of its first
        # characters it is known that they complete no stop string.
        self._held = ""
        self._num_searched = 0
        # Of the call that is open, until its arguments begin; and these.
        self._name = ""
        self._arguments: JsonMender | None = None
        self._pieces: list[Piece] = []

    def copy(self) -> "ChannelReader":
        """An independent one in the same state, which is not within a call."""
        assert self._arguments is None, "calls are never copied"
        copied = copy.copy(self)
        copied._pieces = []
        return copied

    @property
    def num_held(self) -> int:
        """As in `OutputReader`."""
        return len(self._held)

    def feed(self, text: str, *, counts_stops: bool = True) -> Read:
        """As in `OutputReader`. A token counts as reasoning that begins or ends in it."""
        self._counts_stops = counts_stops
        before = self._place
        self._read(text)
        is_reasoning = _Place.REASONING in (before, self._place)
        return Read(self._take(), int(is_reasoning), before is _Place.CALL)

    def finish(self, tail: str = "") -> Read:
        """As in `OutputReader`."""
        self._read(tail)
        if self.stopped:
            return Read(self._take())
        held, self._held = self._held, ""
        if self._place is _Place.CALL:
            self._read_arguments(held)
            if self._arguments is not None:
                # Cut, unless it is whole.
                self._arguments.flush()
                self._take_arguments()
        elif self._place is not _Place.HEADER or "to=".startswith(held.lstrip()):
            self._show(held)
        return Read(self._take())

    def _take(self) -> Sequence[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text and not self.stopped:
            text = (
                self._read_header(text) if self._place is _Place.HEADER else self._read_text(text)
            )

    def _read_header(self, text: str) -> str:
        """Returns what is behind it; "": it is held back."""
        header, message, rest = text.partition(_MESSAGE)
        if message:
            self._begin_text(header)
            return rest
        begun = text.lstrip()
        may_be = any(begun.startswith(tag) or tag.startswith(begun) for tag in _HEADERS)
        if may_be and len(text) <= _MAX_HEADER:
            self._held = text
            return ""
        self._place = _Place.ANSWER
        return text

    def _begin_text(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        self._name = recipient[1].removeprefix(_NAMESPACE) if recipient else ""
        if self._name in self._names:
            self._place = _Place.CALL
        elif recipient or _IN_ANALYSIS.search(header):
            self._place = _Place.REASONING
        else:
            self._place = _Place.ANSWER

    def _read_text(self, text: str) -> str:
        """Returns what is behind it; "": the rest of it is held back."""
        found = _END.search(text)
        first = found.start() if found else len(text) - _num_begun(text)
        if self._place is _Place.ANSWER and self._counts_stops:
            stop = self._stops.find(text, self._num_searched, found.start() if found else len(text))
            if stop:
                self.stopped = True
                self._show(text[: stop.start])
                self._held = text[stop.start :]
                return ""
        if self._place is _Place.ANSWER and not found:
            first = min(first, len(text) - self._stops.num_begun(text))
        if self._place is _Place.CALL:
            self._read_arguments(text[:first])
        else:
            self._show(text[:first])
        if not found:
            self._held, self._num_searched = text[first:], len(text) - first
            return ""
        self._end_text()
        return text[found.end() :] if found[0] in _ENDS else text[first:]

    def _end_text(self) -> None:
        if self._arguments is not None:
            if not self._arguments.is_complete:
                self._arguments.close()
            self._take_arguments()
        elif self._place is _Place.CALL:
            self._pieces += [CallDelta(self._name, ""), CallDelta(None, "{}")]
        self._place, self._arguments, self._num_searched = _Place.HEADER, None, 0

    def _read_arguments(self, text: str) -> None:
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return
            if text[0] != "{":
                # No arguments of a tool.
                self._place = _Place.REASONING
                self._show(text)
                return
            self._arguments = JsonMender()
            self._pieces.append(CallDelta(self._name, ""))
        while text and not self._arguments.is_complete:
            # No `<` that is left begins a tag.
            text = self._arguments.feed(text, is_plain=text[0] == "<")
        self._take_arguments()

    def _take_arguments(self) -> None:
        assert self._arguments is not None, "they are read"
        if written := self._arguments.take():
            self._pieces.append(CallDelta(None, written))

    def _show(self, text: str) -> None:
        if text:
            is_reasoning = self._place is _Place.REASONING
            self._pieces.append(ReasoningText(text) if is_reasoning else text)


def _num_begun(text: str) -> int:
    """How many of the text's last characters may begin a tag."""
    begin = text.rfind("<", max(0, len(text) - _LONGEST_TAG))
    if begin < 0:
        return 0
    tail = text[begin:]
    return len(tail) if any(tag.startswith(tail) for tag in (*_ENDS, _START, _CHANNEL)) else 0
