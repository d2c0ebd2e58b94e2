"""JSON as models write it is mended; sound JSON stays as it is."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.output.json_mender import JsonMender

TOKENS = [
    *"{}[],:\"'\\ \n-+0159.eEu<",
    "true",
    "False",
    "nul",
    "\x00",
    "\x7f",
    "\xa0",
    "é",
    "\u0661",
    "/",
]
TEXTS = st.lists(st.sampled_from(TOKENS), max_size=16).map("".join)


def mend(pieces: list[str]) -> tuple[str, str]:
    """What is written of a value that ends with the pieces at the latest, and what is left."""
    mender = JsonMender()
    written = rest = ""
    for index, piece in enumerate(pieces):
        while piece and not mender.is_complete:
            piece = mender.feed(piece, is_plain=piece[0] == "<")
            # What was written is taken at any time.
            written += mender.take()
        if mender.is_complete:
            rest = piece + "".join(pieces[index + 1 :])
            break
    mender.close()
    return written + mender.take(), rest


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def parse(text: str) -> object:
    return json.loads(text, parse_constant=_refuse)


@hypothesis.settings(max_examples=500)
@hypothesis.given(TEXTS.map("[{}".format) | TEXTS.map("{{{}".format) | TEXTS)
def test_what_is_written_is_sound_however_the_text_is_divided(text: str) -> None:
    written, rest = mend([text])
    parse(written)
    assert mend(list(text)) == (written, rest)
    try:
        parse(text)
    except ValueError:
        return
    assert (written, rest) == (text, "")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=10,
).filter(lambda value: isinstance(value, dict | list))


@hypothesis.given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_a_sound_value_stays_as_it_is_and_ends_where_it_does(
    value: object, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert mend([text + ",x"]) == (text, ",x")


@hypothesis.given(VALUES, st.integers(min_value=0))
def test_of_a_cut_value_no_more_is_written_than_came(value: object, cut: int) -> None:
    text = json.dumps(value)
    text = text[: cut % len(text)]
    mender = JsonMender()
    assert mender.feed(text) == "" or "<" in text
    mender.flush()
    # But for a comma that does not count yet, and the beginning of an escape.
    assert text.startswith(mender.take().rstrip("\\"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"t": "line1\nline2\ttab\x0b"}', {"t": "line1\nline2\ttab\x0b"}),
        (r'{"t": "C:\dir \d+ it\'s \x41 \u12 \q"}', {"t": r"C:\dir \d+ it's \x41 \u12 \q"}),
        ('{"t": "a\\\nb"}', {"t": "a\\\nb"}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('{"a": [1,, 2,,],, : \xa0}', {"a": [1, 2]}),
        ('{"a": [1 2] "b": 3}', {"a": [1, 2], "b": 3}),
        ('{"a" 1, "b"}', {"a": 1, "b": None}),
        ('{"a": , "b": }', {"a": None, "b": None}),
        ("{'a': 'it is', 'b': 'say \"x\"'}", {"a": "it is", "b": 'say "x"'}),
        ("{a: True, b: None, c: undefined}", {"a": True, "b": None, "c": None}),
        ('{"a": NaN, "b": -Infinity}', {"a": None, "b": None}),
        ('{"a": 007, "b": +1, "c": .5}', {"a": 7, "b": 1, "c": 0.5}),
        ('{"d": 1., "e": 00, "f": -0.50}', {"d": 1, "e": 0, "f": -0.5}),
        ('{"a": hello}', {"a": "hello"}),
        ('{"a": "say "hi" to", "b": "x"}', {"a": 'say "hi" to', "b": "x"}),
        ('{"a": "x"\n "b": "y"}', {"a": "x", "b": "y"}),
        ('{"a": {"b": [1, 2}', {"a": {"b": [1, 2]}}),
        ('{"a": 1]}', {"a": 1}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": 1, 2: 3}', {"a": 1, "2": 3}),
    ],
)  # fmt: skip
def test_a_mistake_is_read_as_what_it_most_likely_means(text: str, value: object) -> None:
    written, rest = mend([text])
    assert parse(written) == value
    assert rest == ""


def test_a_tag_is_left_to_the_caller() -> None:
    mender = JsonMender()
    assert mender.feed('{"a": 1</tool') == "</tool"
    assert not mender.is_in_string
    mender.close()
    assert mender.take() == '{"a": 1}'
    mender = JsonMender()
    assert mender.feed('{"a": "x</') == "</"
    assert mender.is_in_string
