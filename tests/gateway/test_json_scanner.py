"""Where JSON values end, against Python's own reader."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.json_scanner import JsonScanner

TOKENS = [*'{}[],:"\\ \n-+0159.eEu', "true", "false", "null", "nul", "\x00", "\x7f", "é", "\u0661"]
TEXTS = st.lists(st.sampled_from(TOKENS), max_size=12).map("".join)


def scan(text: str, pieces: list[str]) -> tuple[int, bool, bool]:
    """Where the scanner stopped, and whether the value was complete, or wrong."""
    scanner = JsonScanner()
    place = 0
    for piece in pieces:
        stop = scanner.feed(f"#{piece}#", 1, 1 + len(piece)) - 1
        place += stop
        if scanner.is_complete or scanner.is_wrong:
            break
        assert stop == len(piece)
    return place, scanner.is_complete, scanner.is_wrong


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def end_of_value(text: str) -> int | None:
    """Where Python finds the value's end; None: there is none."""
    begin = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        return json.JSONDecoder(parse_constant=_refuse).raw_decode(text, begin)[1]
    except ValueError:
        return None


@hypothesis.settings(max_examples=500)
@hypothesis.given(TEXTS.map("[{}".format) | TEXTS.map("{{{}".format) | TEXTS)
def test_a_value_ends_where_it_does_for_python(text: str) -> None:
    whole = scan(text, [text])
    place, is_complete, is_wrong = whole
    if is_complete:
        assert end_of_value(text) == place
    elif text.strip()[:1] in ("[", "{", '"'):
        # Of `1.5.` Python reads the beginning; within brackets it does not.
        assert end_of_value(text) is None
    assert not (is_complete and is_wrong)
    assert scan(text, list(text)) == whole


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=10,
)


@hypothesis.given(VALUES, st.sampled_from([None, 2]), st.integers(min_value=0))
def test_every_beginning_of_a_value_is_none_but_no_mistake(
    value: object, indent: int | None, cut: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert scan(text, [text + ","]) == (len(text), True, False)
    beginning = text[: cut % len(text)]
    is_string = text[0] in '"[{'
    assert scan(beginning, [beginning]) == (len(beginning), False, False) or not is_string


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("NaN", 0),
        ("[Infinity]", 1),
        ("[01]", 2),
        ("[1.]", 3),
        ("[-]", 2),
        ("[1e+]", 4),
        ("[tru]", 4),
        ("[1,]", 3),
        ('{"a":1,}', 7),
        ('{"a" 1}', 5),
        ("{1:2}", 1),
        ('["a\nb"]', 3),
        ('["\\x"]', 3),
        ('["\\u12g4"]', 6),
        ("[1}", 2),
        ("[\u0661]", 1),
        ("[\xa01]", 1),
    ],
)
def test_the_first_mistake_is_found_where_it_is(text: str, place: int) -> None:
    assert scan(text, [text]) == (place, False, True)
    assert scan(text, list(text)) == (place, False, True)
