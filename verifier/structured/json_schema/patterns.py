"""What the library does not know of patterns: look-ahead, of which some can be said otherwise."""

import re
from collections.abc import Iterator

# A look-ahead at the beginning: one that must match, and one that forbids a text of these
# characters alone. Everything else of the kind is no regular expression of the library's.
_AHEAD = re.compile(r"\^\(\?=")
_NOT_ONLY = re.compile(r"\^\(\?!\^?\[(?P<characters>[^\]\\^]+)\]\*\$\)")
# What Pydantic writes for a Decimal with a number of digits.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:\\d\{0,(?P<whole>\d{1,2})\}\|"
    r"\(\?=\[\\d\.\]\{1,(?P<digits>\d{1,2})\}0\*\$\)"
    r"(?:\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d{1,2})\}|\\d\*\\\.\\d\*)0\*\$\)"
)
# What Zod writes for a duration and an e-mail address, and the same without look-ahead.
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_EQUAL_PATTERNS = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": rf"^P(?:\d+W|{_DAYS}(?:{_TIME})?|{_TIME})$",
    **{
        rf"^(?!\.)(?!.*\.\.)([{az}0-9_'+\-\.]*)[{az}0-9_+-]@"
        rf"([{az}0-9][{az}0-9\-]*\.)+[{az}]{{2,}}$": rf"^([{az}0-9_'+\-]+\.)*"
        rf"[{az}0-9_'+\-]*[{az}0-9_+-]@([{az}0-9][{az}0-9\-]*\.)+[{az}]{{2,}}$"
        for az in ("A-Za-z", "a-zA-Z")
    },
}
_CODE = r"(?:0[0-8bBeEfF]|1[0-9a-fA-F])"
_CONTROL_CODE = (
    rf"(?:[\x00-\x08\x0b\x0e-\x1f]|\\x{_CODE}|\\u00{_CODE}|\\[xu]\{{0*{_CODE}\}}|\\[av0])"
)
_CONTROL = re.compile(rf"{_CONTROL_CODE}|\\p\{{(?:Cc?|Control)\}}|\[:cntrl:\]")
_CLASS_WITH_OTHERS = re.compile(rf"\[\^(?:\\.|[^\]\\])*\]|{_CONTROL_CODE}-(?!{_CONTROL_CODE})")
LOOK_AROUND = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB]")


def without_look_ahead(pattern: str) -> list[str]:
    """Patterns that hold together where this one does: without look-ahead, where that is easy."""
    pattern = _EQUAL_PATTERNS.get(pattern, pattern)
    if found := _DECIMAL.fullmatch(pattern):
        return _decimal(int(found["whole"]), int(found["digits"]), found["places"])
    if found := _NOT_ONLY.match(pattern):
        rest = pattern[found.end() :]
        if not _has_alternatives(rest):
            return [f"^{rest}", f"[^{found['characters']}]"]
    if found := _AHEAD.match(pattern):
        end = _end_of_group(pattern, 1)
        if end is not None and not _has_alternatives(pattern[end:]):
            return [f"^{pattern[end:]}", f"^(?:{pattern[found.end() : end - 1]})"]
    return [pattern]


def _decimal(num_whole: int, num_characters: int, num_places: str | None) -> list[str]:
    """A number with these digits before the point; with the point, so many characters."""
    num_digits = num_characters - 1
    if num_places is None:
        shapes = [(whole, num_digits - whole) for whole in range(num_digits + 1)]
    else:
        shapes = [(num_whole, min(int(num_places), num_digits - num_whole))]
    fractions = (rf"\d{{0,{whole}}}\.\d{{0,{places}}}" for whole, places in shapes)
    return [rf"^[+-]?0*(?:\d{{0,{num_whole}}}|{'|'.join(fractions)})$", "[0-9]"]


def _groups(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The parentheses and alternatives of a pattern: place, character, depth before it."""
    depth, in_class, skip = 0, False, False
    for place, character in enumerate(pattern):
        if skip or character == "\\":
            skip = not skip
        elif in_class or character == "[":
            in_class = character != "]"
        elif character in "()|":
            yield place, character, depth
            depth += {"(": 1, ")": -1}.get(character, 0)


def _has_alternatives(pattern: str) -> bool:
    return any(character == "|" and depth <= 0 for _, character, depth in _groups(pattern))


def _end_of_group(pattern: str, start: int) -> int | None:
    """The place after the group that begins there."""
    for place, character, depth in _groups(pattern[start:]):
        if character == ")" and depth == 1:
            return start + place + 1
    return None


def needs_control_characters(pattern: str) -> bool:
    """Whether it names control characters otherwise than in a range or class with others."""
    return bool(_CONTROL.search(_CLASS_WITH_OTHERS.sub("", pattern)))
