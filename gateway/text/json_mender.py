"""JSON as models write it, turned into sound JSON as its text comes.

Owns what a mistake means. Sound JSON stays as it is, to the character. Elsewhere each character is
read as what it most likely stands for, and what is written parses: control characters in strings
are escaped, and so are backslashes that begin no escape and quotes that end no string; commas and
colons that lack are added, and those too many are left out; `True`, `None`, `NaN`, `007` and bare
words become the values closest to them. However the text is divided, the same is written.
"""

import enum
import json
import re

_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_OPENERS = {"}": "{", "]": "["}
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')

# In a string: what stays as it is. A `<` may begin a tag, which the caller looks for.
_PLAIN = re.compile(r'[^"\'\\<\x00-\x1f]+')
_SPACES = re.compile(r"[ \t\n\r]+")
# A number, `true` or a bare word goes up to one of these.
_WORD = re.compile(r"[^\s{}\[\]:,\"'<]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LOOSE_NUMBER = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "none": "null",
    "undefined": "null",
    "nan": "null",
    "infinity": "null",
    "-infinity": "null",
}


class _Next(enum.Enum):
    """What may come next, in place of a part of a string or a word."""

    VALUE = enum.auto()
    # Or the end of the list or the object.
    ITEM = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    # Or a comma.
    END = enum.auto()


class JsonMender:
    """Reads one value; white space may come first.

    Attributes:
        is_complete: whether the value is; nothing may follow.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._next = _Next.VALUE
        # The open brackets.
        self._open: list[str] = []
        self._written: list[str] = []
        # A comma and the white space behind it: written with what follows, the comma if it counts.
        self._comma = ""
        # The quote that the open string began with; "": none is open.
        self._quote = ""
        self._is_key = False
        # Within a string: a backslash and what belongs to it, or a quote that may end the string
        # and the white space behind it.
        self._pending = ""
        # A number or a word that may go on.
        self._word = ""

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends within a string; its end is certain with what follows it."""
        return bool(self._quote) and self._pending[:1] != self._quote

    def take(self) -> str:
        """What was written since the last time."""
        written, self._written = "".join(self._written), []
        return written

    def feed(self, text: str, start: int, *, is_plain: bool = False) -> int:
        """Reads on, up to the value's end or a `<`, which may begin a tag that ends the value.

        Args:
            start: where in the text.
            is_plain: the first character is a `<` that begins no such tag.

        Returns:
            The place of the first character that was not read.
        """
        place = start
        while place < len(text) and not self.is_complete:
            if text[place] == "<" and not is_plain:
                break
            read = self._read_string if self._quote else self._read_structure
            now = read(text, place)
            is_plain = is_plain and now == place
            place = now
        return place

    def close(self) -> None:
        """The value is over: writes what it lacks."""
        if self._quote:
            self._end_string()
        self._end_word()
        while not self.is_complete:
            if self._open:
                self._close(_CLOSERS[self._open[-1]])
            else:
                self._write_value("null")

    def flush(self) -> None:
        """The text is cut within the value: writes what was held back, and no more."""
        if self._pending[:1] == self._quote:
            self._written.append('"' * bool(self._quote))
        else:
            self._written.append(self._pending)
        if self._word:
            self._write_comma()
            self._written.append(self._word)
        self._pending = self._word = ""

    def _read_structure(self, text: str, place: int) -> int:
        character = text[place]
        if found := _WORD.match(text, place):
            self._word += found[0]
            return found.end()
        if character == "<":
            self._word += character
            return place + 1
        self._end_word()
        if self.is_complete:
            return place
        if character in _SPACE:
            found = _SPACES.match(text, place)
            assert found is not None, "there is some"
            if self._comma:
                self._comma += found[0]
            else:
                self._written.append(found[0])
            return found.end()
        if character in "{[":
            self._begin_value()
            self._written.append(character)
            self._open.append(character)
            self._next = _Next.KEY if character == "{" else _Next.ITEM
        elif character in "}]":
            self._close(character)
        elif character == ",":
            self._read_comma()
        elif character == ":":
            if self._next is _Next.COLON:
                self._written.append(":")
                self._next = _Next.VALUE
        elif character in "\"'":
            self._begin_string(character)
        # Else it is another kind of white space.
        return place + 1

    def _read_comma(self) -> None:
        if self._next in (_Next.COLON, _Next.VALUE) and self._open:
            self._write_value("null")
        if self._next is _Next.END:
            self._comma = ","
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.ITEM

    def _begin_value(self) -> None:
        """Writes what must stand between a value and what comes before it."""
        if self._next is _Next.END:
            self._comma = ","
            self._next = _Next.KEY if self._open[-1] == "{" else _Next.ITEM
        self._write_comma()
        if self._next is _Next.KEY:
            self._written.append('""')
            self._next = _Next.COLON
        if self._next is _Next.COLON:
            self._written.append(":")

    def _write_comma(self) -> None:
        self._written.append(self._comma)
        self._comma = ""

    def _write_value(self, value: str) -> None:
        self._begin_value()
        self._written.append(value)
        self._end_value()

    def _end_value(self) -> None:
        self.is_complete = not self._open
        self._next = _Next.END

    def _close(self, closer: str) -> None:
        """Closes a bracket, and those in it that are open."""
        opener = _OPENERS[closer]
        if opener not in self._open:
            return
        while True:
            if self._next in (_Next.VALUE, _Next.COLON):
                self._write_value("null")
            if self._comma:
                self._written.append(self._comma[1:])
                self._comma = ""
            last = self._open.pop()
            self._written.append(_CLOSERS[last])
            self._end_value()
            if last == opener:
                return

    def _begin_string(self, quote: str) -> None:
        if self._next is _Next.END and self._open[-1] == "{":
            self._comma, self._next = ",", _Next.KEY
        self._is_key = self._next is _Next.KEY
        if self._is_key:
            self._write_comma()
        else:
            self._begin_value()
        self._written.append('"')
        self._quote = quote

    def _end_string(self) -> None:
        pending, self._pending = self._pending, ""
        if pending[:1] == "\\":
            self._write_backslash(pending)
            pending = ""
        self._written.append('"' + pending[1:])
        self._quote = ""
        if self._is_key:
            self._next = _Next.COLON
        else:
            self._end_value()

    def _read_string(self, text: str, place: int) -> int:
        character = text[place]
        if self._pending[:1] == "\\":
            return place + self._read_escape(character)
        if self._pending:
            return place + self._read_behind_quote(character)
        if found := _PLAIN.match(text, place):
            self._written.append(found[0])
            return found.end()
        if character == "\\":
            self._pending = character
        elif character != self._quote:
            self._write_character(character)
        elif self._is_key or len(self._open) == 0:
            self._pending = character
            self._end_string()
        else:
            self._pending = character
        return place + 1

    def _write_character(self, character: str) -> None:
        """Of a string: one that may not stand there as it is, but `'` and `<`."""
        if character in "'<":
            self._written.append(character)
        else:
            self._written.append(json.dumps(character)[1:-1])

    def _read_behind_quote(self, character: str) -> int:
        """What follows a quote tells whether it ends the string; returns how many were read."""
        if character in _SPACE:
            self._pending += character
            return 1
        # Where a comma lacks, the next member often stands on a line of its own.
        begins_line = character in "\"'" and "\n" in self._pending
        if character in ",:}]" or begins_line:
            self._end_string()
            return 0
        pending, self._pending = self._pending, ""
        self._written.append(json.dumps(pending)[1:-1] if self._quote == '"' else pending)
        return 0

    def _read_escape(self, character: str) -> int:
        """Behind a backslash; returns how many characters were read."""
        pending = self._pending + character
        if pending == "\\u" or (pending[1] == "u" and character in _HEX):
            self._pending = pending
            if len(pending) == len("\\u0000"):
                self._pending = ""
                self._written.append(pending)
            return 1
        pending, self._pending = self._pending, ""
        if pending == "\\" and character in _ESCAPES:
            self._written.append(pending + character)
            return 1
        if pending == "\\" and character == "'":
            self._written.append(character)
            return 1
        self._write_backslash(pending)
        return 0

    def _write_backslash(self, pending: str) -> None:
        """One that begins no escape."""
        self._written.append("\\" + pending)

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        if self._next is _Next.KEY or (self._next is _Next.END and self._open[-1] == "{"):
            self._begin_string('"')
            self._written.append(json.dumps(word)[1:-1])
            self._end_string()
        else:
            value = _value_of(word)
            self._write_value(value)


def _value_of(word: str) -> str:
    """The JSON value that a word stands for."""
    if _NUMBER.fullmatch(word) or word in ("true", "false", "null"):
        return word
    if constant := _CONSTANTS.get(word.lower()):
        return constant
    if loose := _LOOSE_NUMBER.fullmatch(word):
        whole, _, fraction = loose[2].partition(".")
        point = "." if fraction else ""
        sign, exponent = loose[1].strip("+"), loose[3] or ""
        return f"{sign}{whole.lstrip('0') or '0'}{point}{fraction}{exponent}"
    return json.dumps(word)
