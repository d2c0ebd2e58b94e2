"""One tool call, a JSON object with a name and arguments, as its text comes.

Owns from where on a text is a call for certain: once it has named a given tool and has begun an
object of arguments, in either order. Nothing takes that back: from then on, all that the model
writes up to the call's end belongs to it, mistakes too. The arguments are shown as they come,
mended where they are no sound JSON (`json_mender.py`).
"""

import enum
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gateway.text.output.json_mender import JsonMender, mended

# A longer text is none: until it is certain, it is kept.
MAX_UNCERTAIN_CHARACTERS = 1 << 16

# Each form teaches one of them, but models write either.
_ARGUMENTS_KEYS = ("arguments", "parameters")

_SPACE = " \t\n\r"
# Of a call that is over: brackets that are too many, and what may stand between two in a list.
_LEFT_OVER = _SPACE + '}],"'


class _State(enum.Enum):
    """What may come next in the call, besides a key or a value that has begun."""

    OPEN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    # Two objects in a list.
    BETWEEN = enum.auto()
    END = enum.auto()


_NEXT = {
    (_State.OPEN, "{"): _State.KEY,
    (_State.COLON, ":"): _State.VALUE,
    (_State.COMMA, ","): _State.KEY,
    (_State.BETWEEN, ","): _State.OPEN,
    (_State.BETWEEN, "]"): _State.END,
}


class CallDelta(NamedTuple):
    """What came of a call.

    Attributes:
        name: of a call that begins; None: it goes on.
        arguments: the next piece of a JSON object; "" where a call begins.
    """

    name: str | None
    arguments: str


def joined(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """The same, with a call's pieces that follow each other as one."""
    taken: list[CallDelta] = []
    for delta in deltas:
        if delta.name is None and taken and taken[-1].name is None:
            taken[-1] = CallDelta(None, taken[-1].arguments + delta.arguments)
        else:
            taken.append(delta)
    return taken


def num_begun(text: str, tag: str) -> int:
    """How many of the text's last characters may begin a tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


class CallReader:
    """Reads one call, or several in a list: up to the end, or to the first character that cannot
    belong to a call while it is not certain that it is one.

    Attributes:
        is_over: whether it is read; nothing may follow.
        has_begun: whether it is a call for certain.
    """

    def __init__(
        self, names: Collection[str], before: str, *, tags: tuple[str, str] | None
    ) -> None:
        """Args:
        names: of the tools that may be called.
        before: what was read already, and is text if this is no call.
        tags: of which the first one came before it, so that the second one ends it, unless it is
            empty; None: nothing came before it.
        """
        self.is_over = False
        self.has_begun = False
        self._names = names
        self._has_tags = tags is not None
        self._begin_tag, self._end_tag = tags or ("", "")
        self._is_list = False
        self._deltas: list[CallDelta] = []
        # All of the text, while it may yet be no call.
        self._held = [before]
        self._num_held = len(before)
        # A `<` and what follows it, which may yet be a tag: it was not read.
        self._tail = ""
        self._state = _State.OPEN
        self._begin_object()

    @property
    def num_held(self) -> int:
        """How many characters of the text may yet be no call, or something else of it."""
        return self._num_held + len(self._tail)

    def feed(self, text: str) -> str:
        """Reads on; returns what was not read, once it is over."""
        text, self._tail = self._tail + text, ""
        while text and not (self.is_over or self._tail):
            if self.has_begun:
                text = self._read_on(text)
                continue
            num_free = MAX_UNCERTAIN_CHARACTERS - self._num_held
            part = text[:num_free]
            rest = self._read_on(part)
            num_read = len(part) - len(rest) - len(self._tail)
            if not self.has_begun:
                self._held.append(part[:num_read])
                self._num_held += num_read
            self.is_over |= num_read == num_free and not self.has_begun
            text = text[num_read:]
        return text if self.is_over else ""

    def finish(self) -> None:
        """The text is over: the call is whole, or cut."""
        tail, self._tail = self._tail, ""
        if self._end_tag and tail.startswith(self._end_tag):
            self._end_by_tag()
        elif self._mender is not None and not self.is_over:
            if self._mender.is_in_string and tail:
                self._mender.feed(tail, is_plain=True)
            self._mender.flush()
            self._take_mended()
        if not self.has_begun:
            self._held.append(tail)
        self.is_over = True

    def take(self) -> list[CallDelta]:
        """What came since the last time; a piece of arguments is whole."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    def rest(self) -> str:
        """The text, if it is no call; of one that is over, or at the end of all text."""
        return "" if self.has_begun else "".join(self._held)

    def _begin_object(self) -> None:
        # Reads a key or a value, up to its end.
        self._mender: JsonMender | None = None
        self._read: list[str] = []
        self._key: str | None = None
        self._name: str | None = None
        # Mended; those that came before the name.
        self._arguments: list[str] | None = None
        # Whether a key of arguments came with something else than an object.
        self._is_without_object = False
        self._is_certain = False

    def _read_on(self, text: str) -> str:
        """Reads a character, or what there is of a key or a value; returns the rest."""
        if text[0] == "<" and self._end_tag and (mark := self._mark(text)) is not None:
            if mark:
                self._end_by_tag()
                return text[len(self._end_tag) :]
            self._tail = text
            return ""
        if self._mender is None:
            return text[self._step(text[0]) :]
        rest = self._mender.feed(text, is_plain=text[0] == "<")
        self._take_mended()
        if self._mender.is_complete:
            self._end_part()
        return rest

    def _mark(self, text: str) -> bool | None:
        """Whether the text begins with the end tag. False: it may yet; None: it does not.

        A string may hold the end tag. It ends the call all the same if the text ends behind it, or
        another call begins: then the string lacks its end.
        """
        if text.startswith(self._end_tag):
            if self._mender is None or not self._mender.is_in_string:
                return True
            behind = text[len(self._end_tag) :].lstrip(_SPACE)
            if behind.startswith(self._begin_tag):
                return True
            return False if self._begin_tag.startswith(behind) else None
        return False if self._end_tag.startswith(text) else None

    def _step(self, character: str) -> int:
        """Reads one of the call's own characters; returns how many were: one or none."""
        state = self._state
        if state is _State.END and character == "{" and self._has_tags:
            # Another call between the same tags, which is no list.
            self._state = _State.KEY
            return 1
        if state is _State.END:
            self.is_over = character not in _LEFT_OVER or not self._has_tags
            return 0 if self.is_over else 1
        if character in _SPACE:
            return 1
        if state is _State.VALUE:
            return self._begin_value(character)
        if (character in "\"'" or character.isalpha()) and state in (_State.KEY, _State.COMMA):
            self._state = _State.COLON
            self._mender = JsonMender()
            return 0
        if character == "}" and state in (_State.KEY, _State.COMMA):
            self._end_object()
        elif character == "[" and state is _State.OPEN and self._has_tags:
            self._is_list = True
        elif next_state := _NEXT.get((state, character)):
            self._state = next_state
        elif not self.has_begun:
            self.is_over = True
            return 0
        return 1

    def _begin_value(self, character: str) -> int:
        if character in ",}" and self.has_begun:
            self._state = _State.COMMA
            return 0
        is_name = self._key == "name" and self._name is None
        is_arguments = self._key in _ARGUMENTS_KEYS and self._arguments is None
        if is_name and character not in "\"'":
            self.is_over = not self.has_begun
            is_name = False
        if is_arguments and character == "{":
            self._arguments = []
        elif not (is_name or is_arguments):
            self._key = None
        self._state = _State.COMMA
        self._mender = JsonMender()
        self._begin_if_certain()
        return 0

    def _take_mended(self) -> None:
        """Takes in what the mender has written: of a key, or of a value that counts."""
        assert self._mender is not None, "it has written it"
        text = self._mender.take()
        if self._state is _State.COLON or self._key == "name":
            self._read.append(text)
        elif self._key in _ARGUMENTS_KEYS and text:
            if self._arguments is None:
                self._read.append(text)
            elif self._is_certain:
                self._deltas.append(CallDelta(None, text))
            else:
                self._arguments.append(text)

    def _end_part(self) -> None:
        """Takes in a key, or a value."""
        self._mender = None
        read, self._read = "".join(self._read), []
        if self._state is _State.COLON:
            self._key = json.loads(read)
            return
        if self._key == "name":
            self._name = json.loads(read)
            if self._name in self._names:
                self._begin_if_certain()
            else:
                self.is_over = not self.has_begun
        elif self._key in _ARGUMENTS_KEYS and self._arguments is None:
            value = json.loads(read) if read.startswith('"') else ""
            if value.lstrip().startswith("{"):
                # Written as clients are given them.
                self._arguments = [mended(value)]
                self._begin_if_certain()
            else:
                self._is_without_object |= read != "null"
        self._key = None

    def _begin_if_certain(self) -> None:
        if self._name not in self._names or self._arguments is None or self._is_certain:
            return
        self.has_begun = self._is_certain = True
        self._held = []
        self._num_held = 0
        self._deltas.append(CallDelta(self._name, ""))
        self._deltas += [CallDelta(None, piece) for piece in self._arguments]

    def _end_object(self) -> None:
        if self._arguments is None and not self._is_without_object:
            self._arguments = ["{}"]
            self._begin_if_certain()
        if not self.has_begun:
            self.is_over = True
        self._state = _State.BETWEEN if self._is_list else _State.END
        self._begin_object()

    def _end_by_tag(self) -> None:
        """The end tag is read: what is open in the call ends with it."""
        if self._mender is not None and self._is_certain:
            self._mender.close()
            self._take_mended()
            self._end_part()
        if self._mender is None and self._state in (_State.COMMA, _State.KEY):
            self._end_object()
        self.is_over = True
