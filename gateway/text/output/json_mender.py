"""JSON as models write it, turned into sound JSON as its text comes.

Owns what a mistake means. Sound JSON stays as it is, to the character. Elsewhere each character is
read as what it most likely stands for, and what is written parses: control characters in strings
are escaped, and so are backslashes that begin no escape and quotes that end no string; commas and
colons that lack are added, and those too many are left out; `True`, `None`, `NaN`, `007` and bare
words become the values closest to them. However the text is divided, the same is written: what
depends on the characters behind it waits for them.
"""

import enum
import json
import re

_CLOSERS = {"{": "}", "[": "]"}
# In a string: what stays as it is. A `<` may begin a tag, which the caller looks for.
_PLAIN = re.compile(r'[^"\'\\<\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SPACE = re.compile(r"[ \t\n\r]*")
# What is left out behind a comma, with other kinds of white space.
_NOTHING = re.compile(r"[\s,:]*")
# A number, `true` or a bare word.
_WORD = re.compile(r"<?[^\s{}\[\]:,\"'<]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LOOSE_NUMBER = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"true": "true", "false": "false"} | dict.fromkeys(
    ("null", "none", "undefined", "nan", "infinity", "-infinity"), "null"
)


class _Next(enum.Enum):
    """What may come next, outside of strings."""

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
        # The quote that the open string began with; "": none is open.
        self._quote = ""
        # What depends on the characters behind it: the beginning of an escape or a word, or a quote
        # or a comma, and white space.
        self._held = ""
        self._written: list[str] = []

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends within a string, and not with what may end it."""
        return bool(self._quote) and self._held[:1] != self._quote

    def take(self) -> str:
        """What was written since the last time."""
        written, self._written = "".join(self._written), []
        return written

    def feed(self, text: str, *, is_plain: bool = False) -> str:
        """Reads on, up to the value's end or a `<`, which may begin a tag that ends the value.

        Args:
            is_plain: the first character is a `<` that begins no such tag.

        Returns:
            What was not read.
        """
        mark = text.find("<", is_plain)
        text, rest = (text, "") if mark < 0 else (text[:mark], text[mark:])
        text, self._held = self._held + text, ""
        place = 0
        while place < len(text) and not self.is_complete:
            end = (self._read_string if self._quote else self._read_structure)(text, place)
            if end is None:
                self._held = text[place:]
                return rest
            place = end
        return text[place:] + rest

    def close(self) -> None:
        """The value is over: writes what it lacks."""
        if self._quote:
            # A backslash would take the quote with it.
            self._written.append("\\\\" if self._held == "\\" else "")
            held = "" if self._held == "\\" else self._held
            self._held = held if held[:1] == self._quote else held + self._quote
        while not self.is_complete:
            self.feed(_CLOSERS[self._open[-1]] if self._open else ",")
            if not (self._open or self.is_complete):
                self._write_value("null")

    def flush(self) -> None:
        """The text is cut within the value: writes what was held back, and no more."""
        held, self._held = self._held, ""
        self._written.append('"' if self._quote and held[:1] == self._quote else held)

    # Each returns where to go on; None: that depends on what follows the text.

    def _read_string(self, text: str, place: int) -> int | None:
        character = text[place]
        if found := _PLAIN.match(text, place):
            self._written.append(found[0])
            return found.end()
        if character == "\\":
            if found := _ESCAPE.match(text, place):
                self._written.append(found[0])
                return found.end()
            if _BEGUN_ESCAPE.fullmatch(text, place):
                return None
            # Of `\'` the quote stays.
            self._written.append("'" if text[place + 1] == "'" else "\\\\")
            return place + 1 + (text[place + 1] == "'")
        if character == self._quote:
            return self._read_quote(text, place)
        self._written.append(character if character in "'<" else json.dumps(character)[1:-1])
        return place + 1

    def _read_quote(self, text: str, place: int) -> int | None:
        """A quote ends its string if what follows it may follow a value, or a key."""
        space = _after_space(text, place + 1)
        if self._open and self._next is not _Next.COLON:
            if space == len(text):
                return None
            # Where a comma lacks, the next member often stands on a line of its own.
            begins_line = text[space] in "\"'" and "\n" in text[place:space]
            if text[space] not in ",:}]" and not begins_line:
                self._written.append('\\"' if self._quote == '"' else "'")
                return place + 1
        self._written.append('"')
        self._quote = ""
        if self._next is not _Next.COLON:
            self._end_value()
        return place + 1

    def _read_structure(self, text: str, place: int) -> int | None:
        character = text[place]
        if (end := _after_space(text, place)) > place:
            self._written.append(text[place:end])
            return end
        if character in "{[":
            self._begin_value()
            self._written.append(character)
            self._open.append(character)
            self._next = _Next.KEY if character == "{" else _Next.ITEM
        elif character in "}]":
            self._close(character)
        elif character == ":":
            if self._next is _Next.COLON:
                self._written.append(":")
                self._next = _Next.VALUE
        elif character == ",":
            # Of several commas, none counts before the end.
            end = _after_space(text, place + 1, _NOTHING)
            if end == len(text) and self._open:
                return None
            self._read_comma(is_last=text[end : end + 1] in ("}", "]", ""))
        elif character in "\"'":
            self._begin_value(may_be_key=True)
            self._written.append('"')
            self._quote = character
        elif (word := _WORD.match(text, place)) and word[0]:
            if word.end() == len(text):
                return None
            self._write_word(word[0])
            return word.end()
        # Else it is another kind of white space.
        return place + 1

    def _read_comma(self, *, is_last: bool) -> None:
        if self._next in (_Next.COLON, _Next.VALUE):
            self._write_value("null")
        if self._next is _Next.END and self._open and not is_last:
            self._write_comma()

    def _write_comma(self) -> None:
        self._written.append(",")
        self._next = _Next.KEY if self._open[-1] == "{" else _Next.ITEM

    def _begin_value(self, *, may_be_key: bool = False) -> None:
        """Writes what must stand between a value, or a key, and what comes before it."""
        if self._next is _Next.END:
            self._write_comma()
        if self._next is _Next.KEY:
            self._next = _Next.COLON
            if may_be_key:
                return
            self._written.append('""')
        if self._next is _Next.COLON:
            self._written.append(":")
        self._next = _Next.VALUE

    def _write_value(self, value: str) -> None:
        self._begin_value()
        self._written.append(value)
        self._end_value()

    def _write_word(self, word: str) -> None:
        if self._next is _Next.KEY or (self._next is _Next.END and self._open[-1] == "{"):
            self._begin_value(may_be_key=True)
            self._written.append(json.dumps(word))
        else:
            self._write_value(_value_of(word))

    def _end_value(self) -> None:
        self.is_complete = not self._open
        self._next = _Next.END

    def _close(self, closer: str) -> None:
        """Closes a bracket, and those in it that are open."""
        is_open = closer in [_CLOSERS[each] for each in self._open]
        while is_open:
            if self._next in (_Next.VALUE, _Next.COLON):
                self._write_value("null")
            self._written.append(_CLOSERS[self._open.pop()])
            self._end_value()
            is_open = self._written[-1] != closer


def mended(text: str) -> str:
    """A text that begins with a value, as that value alone."""
    mender = JsonMender()
    while text and not mender.is_complete:
        text = mender.feed(text, is_plain=text[0] == "<")
    mender.close()
    return mender.take()


def _after_space(text: str, place: int, space: re.Pattern[str] = _SPACE) -> int:
    found = space.match(text, place)
    assert found is not None, "matches nothing, too"
    return found.end()


def _value_of(word: str) -> str:
    """The JSON value that a word stands for."""
    if _NUMBER.fullmatch(word):
        return word
    if constant := _CONSTANTS.get(word.lower()):
        return constant
    if loose := _LOOSE_NUMBER.fullmatch(word):
        whole, _, fraction = loose[2].partition(".")
        point = "." if fraction else ""
        sign, exponent = loose[1].strip("+"), loose[3] or ""
        return f"{sign}{whole.lstrip('0') or '0'}{point}{fraction}{exponent}"
    return json.dumps(word)
