"""Tool calls in texts: what is a call, however the text is divided."""

import itertools
import json
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.tool_calls import (
    HermesParser,
    Llama3Parser,
    ToolCall,
    ToolCallForm,
    form_of_template,
    make_parser,
)

NAMES = ("add", "get_weather")
ADD = '{"name": "add", "arguments": {"x": 1, "text": "é </b> {\\"}"}}'
ADDED = ToolCall("add", '{"x": 1, "text": "é </b> {\\"}"}')
TAGGED = f"<tool_call>\n{ADD}\n</tool_call>"
QUOTING = '{"name": "add", "arguments": {"a": "</tool_call>", "b": "\\"</tool_call>"}}'
QUOTED = ToolCall("add", '{"a": "</tool_call>", "b": "\\"</tool_call>"}')
WEATHER = '{"name": "get_weather", "parameters": {}}'
INFINITE = '{"name": "add", "arguments": {"x": 1e999}, "parameters": {"x": 1e999}}'
LLAMA_ADD = ADD.replace('"arguments"', '"parameters"')

HERMES = [
    ("no call at all <tool", "no call at all <tool", []),
    (TAGGED, "", [ADDED]),
    (f"I will add.\n\n{TAGGED}\n", "I will add.", [ADDED]),
    (f"{TAGGED}\n{TAGGED}", "", [ADDED, ADDED]),
    (f"{TAGGED} and then \n", "and then \n", [ADDED]),
    (f"a <tool_call>{ADD}", "a", [ADDED]),
    ("a < b <tool_cal l> <tool_call", "a < b <tool_cal l> <tool_call", []),
    # What is no call of a given tool stays text, to the last character.
    ("x <tool_call>{]</tool_call> y", "x <tool_call>{]</tool_call> y", []),
    ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    (
        '<tool_call>{"name": "add", "arguments": 5}',
        '<tool_call>{"name": "add", "arguments": 5}',
        [],
    ),
    ('<tool_call>{"name": ["add"]}</tool_call>', '<tool_call>{"name": ["add"]}</tool_call>', []),
    (
        f"<tool_call>{'[' * 9000}</tool_call>{TAGGED}",
        f"<tool_call>{'[' * 9000}</tool_call>",
        [ADDED],
    ),
    ('<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
    (
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}',
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}',
        [],
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"x": -1e999}}',
        '<tool_call>{"name": "add", "arguments": {"x": -1e999}}',
        [],
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"x": "\\ud800"}}',
        '<tool_call>{"name": "add", "arguments": {"x": "\\ud800"}}',
        [],
    ),
    # An end tag may be within a string.
    (f"<tool_call>{QUOTING}</tool_call> {TAGGED}", "", [QUOTED, ADDED]),
    (f"<tool_call>{QUOTING}", "", [QUOTED]),
    (
        f'<tool_call>{{"name": "add</tool_call>\n{TAGGED}',
        '<tool_call>{"name": "add</tool_call>',
        [ADDED],
    ),
    (
        f'<tool_call>{{"name": "add</tool_call> and {ADD}',
        f'<tool_call>{{"name": "add</tool_call> and {ADD}',
        [],
    ),
    (
        f'<tool_call>"{"</tool_call>" * 99}"{TAGGED}',
        f'<tool_call>"{"</tool_call>" * 99}"',
        [ADDED],
    ),
    (" " * 9000 + TAGGED, " " * (9000 - 256), [ADDED]),
    ("  \n ", "  \n ", []),
]

LLAMA = [
    ("The answer is {5}.", "The answer is {5}.", []),
    (LLAMA_ADD, "", [ADDED]),
    (f" \n{LLAMA_ADD} ; {WEATHER}\n", "", [ADDED, ToolCall("get_weather", "{}")]),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (f"{LLAMA_ADD} and more", f"{LLAMA_ADD} and more", []),
    ('{"name": "add", "para', '{"name": "add", "para', []),
    ("{" * 9000, "{" * 9000, []),
    (INFINITE, INFINITE, []),
    (" ", " ", []),
]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def parse(form: ToolCallForm, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    parser = make_parser(form, NAMES)
    parsed = [parser.feed(piece) for piece in pieces]
    parsed.append(parser.finish())
    return "".join(each.text for each in parsed), [call for each in parsed for call in each.calls]


CASES = [
    *[(ToolCallForm.HERMES, *case) for case in HERMES],
    *[(ToolCallForm.LLAMA3_JSON, *case) for case in LLAMA],
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_divided(
    form: ToolCallForm, text: str, shown: str, calls: list[ToolCall]
) -> None:
    assert parse(form, [text]) == (shown, calls)
    assert parse(form, list(text)) == (shown, calls)
    if len(text) < 1000:
        for first in range(len(text) + 1):
            for second in range(first, len(text) + 1):
                pieces = [text[:first], text[first:second], text[second:]]
                assert parse(form, pieces) == (shown, calls), pieces


@hypothesis.given(
    st.sampled_from(list(ToolCallForm)),
    st.lists(
        st.sampled_from(
            [
                TAGGED,
                "<tool_call>",
                "</tool_call>",
                ADD,
                INFINITE,
                WEATHER,
                "{",
                ";",
                "<",
                " ",
                "ab",
            ]
        ),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_no_division_changes_what_is_found(form: ToolCallForm, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(form, [text])
    assert parse(form, pieces) == whole
    for call in whole[1]:
        assert isinstance(json.loads(call.arguments, parse_constant=_refuse), dict)


@pytest.mark.parametrize("parser", [HermesParser(NAMES), Llama3Parser(NAMES)])
def test_what_is_held_back_is_bounded(parser: HermesParser | Llama3Parser) -> None:
    begin = '<tool_call>{"' if isinstance(parser, HermesParser) else '{"'
    fed = shown = 0
    for piece in [begin, *["x" * 1000] * 200]:
        fed += len(piece)
        shown += len(parser.feed(piece).text)
        assert fed - shown < 70_000
    assert shown > 100_000


class Piece(str):
    """A piece of text that counts how many characters it is added to."""

    num_copied = 0

    def __radd__(self, other: str) -> str:
        Piece.num_copied += len(other)
        return str(other) + str(self)


@pytest.mark.parametrize("begin", ["<tool_call>", '<tool_call>{"', "", "{"])
@pytest.mark.parametrize("form", list(ToolCallForm))
def test_held_text_is_not_copied_with_every_piece(form: ToolCallForm, begin: str) -> None:
    parser = make_parser(form, NAMES)
    parser.feed(begin)
    Piece.num_copied = 0
    pieces = [Piece(" ")] * 20_000
    for piece in pieces:
        parser.feed(piece)
    assert Piece.num_copied <= 20 * len(pieces)


def test_the_form_is_that_which_the_template_teaches() -> None:
    llama = '{"name": name, "parameters": values} Environment: ipython'
    assert form_of_template("<tool_call>{{ call }}</tool_call>") is ToolCallForm.HERMES
    assert form_of_template(llama) is ToolCallForm.LLAMA3_JSON
    assert form_of_template("<tool_call><function=f></function></tool_call>") is None
    assert form_of_template("{{ messages }}") is None
