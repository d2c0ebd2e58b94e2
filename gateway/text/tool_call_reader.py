"""One tool call, a JSON object with a name and arguments, as its text comes.

Owns from where on a text is a call for certain: once it has named a given tool and has begun an
object of arguments, in either order. From then on the arguments are shown as they come, as the
model wrote them; nothing takes them back.
"""

import json
from collections.abc import Collection
from typing import NamedTuple

from gateway.text.json_scanner import JsonScanner

# A longer text is none: until it is certain, it is kept.
MAX_UNCERTAIN_CHARACTERS = 1 << 16

# Each form teaches one of them, but models write either.
_ARGUMENTS_KEYS = ("arguments", "parameters")

_SPACE = " \t\n\r"


class CallDelta(NamedTuple):
    """What came of a call.

    Attributes:
        name: of a call that begins; None: it goes on.
        arguments: the next piece of a JSON object; "" where a call begins.
    """

    name: str | None
    arguments: str


class CallReader:
    """Reads one call, up to its end or the first character that cannot belong to it.

    Attributes:
        is_over: whether it is read; nothing may follow.
        has_begun: whether it is a call for certain.
    """

    def __init__(self, names: Collection[str], before: str) -> None:
        """Args:
        names: of the tools that may be called.
        before: what was read already, and is text if this is no call.
        """
        self.is_over = False
        self.has_begun = False
        self._names = names
        self._deltas: list[CallDelta] = []
        # All of the text, while it may yet be no call.
        self._held = [before]
        self._num_held = len(before)
        # What may come next in the object: one of its own marks, or what `_scanner` reads.
        self._expected = "{"
        self._scanner: JsonScanner | None = None
        self._read: list[str] = []
        self._key: str | None = None
        self._name: str | None = None
        # Those that came before the name.
        self._arguments: list[str] | None = None
        # Whether a key of arguments came with something else than an object.
        self._is_without_object = False

    def feed(self, text: str, start: int) -> int:
        """Reads on; returns the place of the first character that was not read."""
        place = start
        while place < len(text) and not self.is_over:
            end = len(text)
            if not self.has_begun:
                end = min(end, place + MAX_UNCERTAIN_CHARACTERS - self._num_held)
                if end <= place:
                    self.is_over = True
                    break
            first, place = place, self._read_on(text, place, end)
            if not self.has_begun:
                self._held.append(text[first:place])
                self._num_held += place - first
        return place

    def take(self) -> list[CallDelta]:
        """What came since the last time; a piece of arguments is whole."""
        deltas, self._deltas = self._deltas, []
        taken = [each for each in deltas if each.name is not None]
        if arguments := "".join([each.arguments for each in deltas]):
            taken.append(CallDelta(None, arguments))
        return taken

    def rest(self) -> str:
        """The text, if it is no call; of one that is over, or at the end of all text."""
        return "" if self.has_begun else "".join(self._held)

    def _read_on(self, text: str, start: int, end: int) -> int:
        """Reads a character, or what there is of a key or a value; returns where to go on."""
        if self._scanner is None:
            return start + self._step(text[start])
        stop = self._scanner.feed(text, start, end)
        if self._expected == ",}" and self._key in _ARGUMENTS_KEYS:
            self._show(text[start:stop])
        elif not self.has_begun and (self._expected == ":" or self._key == "name"):
            self._read.append(text[start:stop])
        self.is_over = self._scanner.is_wrong
        if self._scanner.is_complete:
            self._scanner = None
            self._end_part()
        return stop

    def _step(self, character: str) -> int:
        """Reads one of the object's own characters; returns how many were: one or none."""
        if character in _SPACE:
            return 1
        if self._expected == "value":
            return self._begin_value(character)
        if character not in self._expected:
            self.is_over = True
            return 0
        if character == '"':
            self._expected = ":"
            self._scanner = JsonScanner()
            self._read = []
            return 0
        if character == "}":
            self._end()
        self._expected = {"{": '"}', ":": "value", ",": '"', "}": ""}[character]
        return 1

    def _begin_value(self, character: str) -> int:
        is_name = self._key == "name" and self._name is None
        is_arguments = self._key in _ARGUMENTS_KEYS and self._arguments is None
        if is_name and character != '"':
            self.is_over = True
            return 0
        if is_arguments and character == "{":
            self._arguments = []
        elif not is_name:
            self._is_without_object |= is_arguments
            self._key = None
        self._expected = ",}"
        self._scanner = JsonScanner()
        self._read = []
        self._begin_if_certain()
        return 0

    def _end_part(self) -> None:
        """Takes in a key, or a value."""
        if self.has_begun:
            self._key = None
        elif self._expected == ":":
            self._key = json.loads("".join(self._read))
        elif self._key == "name":
            self._name = json.loads("".join(self._read))
            self.is_over = self._name not in self._names
            if not self.is_over:
                self._begin_if_certain()

    def _begin_if_certain(self) -> None:
        if self._name is None or self._arguments is None or self.has_begun:
            return
        self.has_begun = True
        self._held = []
        self._deltas.append(CallDelta(self._name, ""))
        self._deltas += [CallDelta(None, piece) for piece in self._arguments]
        self._arguments = []

    def _show(self, arguments: str) -> None:
        if self.has_begun:
            self._deltas.append(CallDelta(None, arguments))
        else:
            assert self._arguments is not None, "this is their value"
            self._arguments.append(arguments)

    def _end(self) -> None:
        """Ends the object."""
        self.is_over = True
        if self._arguments is None and not self._is_without_object:
            self._arguments = ["{}"]
            self._begin_if_certain()
