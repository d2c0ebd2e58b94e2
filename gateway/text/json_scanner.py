"""Where a JSON value ends, as its text comes.

Owns RFC 8259's grammar of one value, character by character: the end and the first mistake are
found at the same place however the text is divided. Keeps nothing but the open brackets.
"""

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')

# States: what is expected next, and where in a string or a number the text stands.
_VALUE, _FIRST_ITEM, _KEY, _FIRST_KEY, _COLON, _NEXT_ITEM, _NEXT_MEMBER = range(7)
_STRING, _ESCAPE, _HEX_1, _HEX_2, _HEX_3, _HEX_4, _LITERAL = range(7, 14)
_MINUS, _ZERO, _INTEGER, _POINT, _FRACTION, _E, _E_SIGN, _EXPONENT = range(14, 22)
# What a character does beside leading to a state.
_OPEN_OBJECT, _OPEN_LIST, _CLOSE, _END_STRING = range(22, 26)

# A number ends before the first character that does not belong to it.
_WHOLE_NUMBERS = frozenset((_ZERO, _INTEGER, _FRACTION, _EXPONENT))
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


def _each(characters: str, step: int) -> dict[str, int]:
    return dict.fromkeys(characters, step)


_SPACE = " \t\n\r"
_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"
_BEGINS = {
    '"': _STRING,
    "{": _OPEN_OBJECT,
    "[": _OPEN_LIST,
    "-": _MINUS,
    "0": _ZERO,
    **_each("123456789", _INTEGER),
    **_each("tfn", _LITERAL),
}
_STEPS: dict[int, dict[str, int]] = {
    _VALUE: {**_each(_SPACE, _VALUE), **_BEGINS},
    _FIRST_ITEM: {**_each(_SPACE, _FIRST_ITEM), **_BEGINS, "]": _CLOSE},
    _KEY: {**_each(_SPACE, _KEY), '"': _STRING},
    _FIRST_KEY: {**_each(_SPACE, _FIRST_KEY), '"': _STRING, "}": _CLOSE},
    _COLON: {**_each(_SPACE, _COLON), ":": _VALUE},
    _NEXT_ITEM: {**_each(_SPACE, _NEXT_ITEM), ",": _VALUE, "]": _CLOSE},
    _NEXT_MEMBER: {**_each(_SPACE, _NEXT_MEMBER), ",": _KEY, "}": _CLOSE},
    _STRING: {'"': _END_STRING, "\\": _ESCAPE},
    _ESCAPE: {**_each('"\\/bfnrt', _STRING), "u": _HEX_1},
    _HEX_1: _each(_HEX, _HEX_2),
    _HEX_2: _each(_HEX, _HEX_3),
    _HEX_3: _each(_HEX, _HEX_4),
    _HEX_4: _each(_HEX, _STRING),
    _MINUS: {"0": _ZERO, **_each("123456789", _INTEGER)},
    _ZERO: {".": _POINT, "e": _E, "E": _E},
    _INTEGER: {**_each(_DIGITS, _INTEGER), ".": _POINT, "e": _E, "E": _E},
    _POINT: _each(_DIGITS, _FRACTION),
    _FRACTION: {**_each(_DIGITS, _FRACTION), "e": _E, "E": _E},
    _E: {**_each(_DIGITS, _EXPONENT), "+": _E_SIGN, "-": _E_SIGN},
    _E_SIGN: _each(_DIGITS, _EXPONENT),
    _EXPONENT: _each(_DIGITS, _EXPONENT),
}


class JsonScanner:
    """Reads one value; white space may come first.

    Attributes:
        is_complete: whether the value is; nothing may follow.
        is_wrong: whether it is no JSON; nothing may follow.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_wrong = False
        self._state = _VALUE
        # Of each open bracket, what is expected behind a value in it.
        self._open: list[int] = []
        self._is_key = False
        # Of a literal: what must still come.
        self._rest = ""

    def feed(self, text: str, start: int, end: int) -> int:
        """Reads on.

        Args:
            start, end: of the piece of the text to read.

        Returns:
            Where the value ends, or the place of the first character that is wrong, or `end`.
        """
        place = start
        while place < end:
            if self._state == _STRING:
                found = _PLAIN.match(text, place, end)
                assert found is not None, "matches nothing, too"
                place = found.end()
                if place == end:
                    break
            if self._state == _LITERAL and self._rest:
                self.is_wrong = text[place] != self._rest[0]
                self._rest = self._rest[1:]
                if self.is_wrong:
                    return place
                place += 1
                if not self._rest and self._end_value():
                    return place
                continue
            step = _STEPS[self._state].get(text[place])
            if step is None:
                if self._state not in _WHOLE_NUMBERS:
                    self.is_wrong = True
                    return place
                if self._end_value():
                    return place
                continue
            self._take(step, text[place])
            place += 1
            if self.is_complete:
                return place
        return place

    def _take(self, step: int, character: str) -> None:
        if step == _STRING and self._state < _STRING:
            self._is_key = self._state in (_KEY, _FIRST_KEY)
        self._state = step
        if step == _LITERAL:
            self._rest = _LITERALS[character]
        elif step == _OPEN_OBJECT:
            self._open.append(_NEXT_MEMBER)
            self._state = _FIRST_KEY
        elif step == _OPEN_LIST:
            self._open.append(_NEXT_ITEM)
            self._state = _FIRST_ITEM
        elif step == _CLOSE:
            self._open.pop()
            self._end_value()
        elif step == _END_STRING:
            if self._is_key:
                self._is_key = False
                self._state = _COLON
            else:
                self._end_value()

    def _end_value(self) -> bool:
        """Ends a value; returns whether it is the whole one."""
        self.is_complete = not self._open
        if self._open:
            self._state = self._open[-1]
        return self.is_complete
