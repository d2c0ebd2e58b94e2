"""Keywords that hold values: checked, and as the library keeps them."""

import math
import re
from collections.abc import Iterator
from typing import Any

from verifier.structured.json_schema.keywords import COUNTS, NUMBERS, TYPES
from verifier.structured.json_schema.refusals import NO_CONTROL_CHARACTERS, refused

# The library computes with floats, which hold no larger integers.
_MAX_INTEGER = 2**53
# Bounds, and the sign by which a value on their far side is positive.
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
# Of a range's width, or of 1.
_NEXT_TO_ZERO = 1e-6
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f]")


def checked_value(key: str, value: Any, path: str) -> Any:
    if key == "type":
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(n, str) and n in TYPES for n in names):
            raise refused(path, f"must be of {', '.join(sorted(TYPES))}")
    elif key in COUNTS:
        is_integer = (isinstance(value, float) and value.is_integer()) or type(value) is int
        if not is_integer or value < 0:
            raise refused(path, "must be an integer that is not negative")
        return int(value)
    elif key in NUMBERS:
        # Of draft 4, a boolean says whether a bound is part of its range.
        if not isinstance(value, int | float):
            raise refused(path, "must be a number")
        if key == "multipleOf" and (isinstance(value, bool) or not 0 < value < math.inf):
            raise refused(path, "must be a number over 0")
    elif key == "required":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise refused(path, "must be a list of strings")
        return list(dict.fromkeys(value))
    elif key == "enum":
        if not isinstance(value, list) or not value:
            raise refused(path, "must be a list that is not empty")
        _check_numbers(value, path)
        _check_characters(value, path)
    elif key == "const":
        _check_numbers(value, path)
        _check_characters(value, path)
    elif not isinstance(value, str):
        raise refused(path, "must be a string")
    return value


def read_range(read: dict[str, Any], path: str) -> None:
    """Bounds as the library keeps them."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        # Of draft 4.
        if isinstance(read.get(exclusive), bool) and read.pop(exclusive) and bound in read:
            read[exclusive] = read.pop(bound)
    for key in _BOUNDS.keys() & read.keys():
        if _BOUNDS[key] * read[key] > _MAX_INTEGER:
            raise refused(f"{path}.{key}", f"numbers over {_MAX_INTEGER} are not supported")
        read[key] = max(-_MAX_INTEGER, min(read[key], _MAX_INTEGER))
    least, over = read.get("minimum", -math.inf), read.get("exclusiveMinimum", -math.inf)
    most, under = read.get("maximum", math.inf), read.get("exclusiveMaximum", math.inf)
    if least > most or over >= min(most, under) or least >= under:
        raise refused(path, "no number is within its bounds")
    # Where a range of fractions has 0 for an open end, the library lets 0 itself pass.
    if over == 0 >= least:
        read.pop("minimum", None)
        read["minimum"] = min(1.0, most, under) * _NEXT_TO_ZERO
        del read["exclusiveMinimum"]
    if under == 0 <= most:
        read.pop("maximum", None)
        read["maximum"] = max(-1.0, least, over) * _NEXT_TO_ZERO
        del read["exclusiveMaximum"]


def _check_numbers(value: Any, path: str) -> None:
    for each in _leaves(value):
        if isinstance(each, int) and not isinstance(each, bool) and abs(each) > _MAX_INTEGER:
            raise refused(path, f"integers over {_MAX_INTEGER} are not supported; write a string")
        if isinstance(each, float) and not abs(each) < float("inf"):
            raise refused(path, "this number is too large")


def _check_characters(value: Any, path: str) -> None:
    for each in _leaves(value):
        if isinstance(each, str) and _CONTROL.search(each):
            raise refused(path, NO_CONTROL_CHARACTERS)


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
        else:
            yield each
