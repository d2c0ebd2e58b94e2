"""Tool calls in texts: what is a call, when it is shown, however the text is divided."""

# ruff: noqa: RUF001 - DeepSeek's marks have bars of full width.

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Read
from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.tool_calls import (
    HermesParser,
    Llama3Parser,
    ToolCallForm,
    ToolCallParser,
    form_of_template,
)
from tests.volume import cases


class ToolCall(NamedTuple):
    """A call as all its deltas together tell it."""

    name: str
    arguments: str


TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "x": {"type": "integer"},
        "text": {"type": "string"},
        "more": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "object"}]},
    },
    "get_weather": {},
}
ADD = '{"name": "add", "arguments": {"x": 1, "text": "é </b> {\\"}"}}'
ADDED = ToolCall("add", '{"x": 1, "text": "é </b> {\\"}"}')
TAGGED = f"<tool_call>\n{ADD}\n</tool_call>"
QUOTING = '{"name": "add", "arguments": {"a": "</tool_call>", "b": "\\"</tool_call>"}}'
QUOTED = ToolCall("add", '{"a": "</tool_call>", "b": "\\"</tool_call>"}')
WEATHER = '{"name": "get_weather", "parameters": {}}'
INFINITE = '{"name": "add", "arguments": {"x": 1e999}, "parameters": {"x": 1e999}}'
LLAMA_ADD = ADD.replace('"arguments"', '"parameters"')
# Under either key, the first object counts, also within a string. Other values are no arguments,
# but not none either, as `null` is.
EITHER_KEY = [
    (
        '{"name": "add", "arguments": "x", "parameters": {"x": 1}, "arguments": {"x": 2}}',
        [ToolCall("add", '{"x": 1}')],
    ),
    (
        '{"parameters": null, "arguments": {"x": 1}, "name": "add"}',
        [ToolCall("add", '{"x": 1}')],
    ),
    ('{"name": "add", "more": {"arguments": {"x": 1}}}', [ToolCall("add", "{}")]),
    ('{"name": "add", "arguments": " {\\"x\\": \'<\', } "}', [ToolCall("add", ' {"x": "<" }')]),
    ('{"arguments": "{}", "name": "add"}', [ToolCall("add", "{}")]),
    ('{"name": "add", "arguments": null}', [ToolCall("add", "{}")]),
    ("{name: 'add', arguments: {x: 1}}", [ToolCall("add", '{"x": 1}')]),
    ('{"name": "add", "arguments": "none"}', []),
    ('{"parameters": [{}], "name": "add"}', []),
]

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
    (f"<tool_call>{LLAMA_ADD}</tool_call>", "", [ADDED]),
    *[
        (f"<tool_call>{text}", "" if calls else f"<tool_call>{text}", calls)
        for text, calls in EITHER_KEY
    ],
    # The arguments stay as they were written.
    (
        '<tool_call>{"name": "add", "arguments": {"x":-1e999 , "y": "\\ud800"}}',
        "",
        [ToolCall("add", '{"x":-1e999 , "y": "\\ud800"}')],
    ),
    # Only the first of each key counts, in either order; others are left out.
    (
        '<tool_call>{"id": [{"name": 1}], "arguments": {"x": {}}, "name": "a\\u0064d", "name": 5}',
        "",
        [ToolCall("add", '{"x": {}}')],
    ),
    (
        '<tool_call>{"arguments": {}, "name": "rm"}',
        '<tool_call>{"arguments": {}, "name": "rm"}',
        [],
    ),
    # A call that has begun is not taken back: its mistakes stay in it, up to its end.
    (
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}\n',
        "",
        [ToolCall("add", '{"x": null}')],
    ),
    (f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", [ADDED, ToolCall("get_weather", "{}")]),
    (f"<tool_call>\n[\n{ADD}\n]\n</tool_call>\nb", "b", [ADDED]),
    (f'<tool_call>[{ADD}, {{"name": "rm"}}, {ADD}]</tool_call> b', "b", [ADDED, ADDED]),
    (f"<tool_call>[5, {ADD}]</tool_call>", f"<tool_call>[5, {ADD}]</tool_call>", []),
    (f"<tool_call>{ADD}<tool_call>{ADD}", "", [ADDED, ADDED]),
    # A string that lacks its end, if nothing but the end of the text or another call follows.
    *[
        (f'<tool_call>{{"name": "add", "arguments": {{"x": "1}}}}</tool_call>{rest}', "", calls)
        for rest, calls in (
            ("", [ToolCall("add", '{"x": "1}}"}')]),
            (f"\n{TAGGED}", [ToolCall("add", '{"x": "1}}"}'), ADDED]),
            (' b"}}', [ToolCall("add", '{"x": "1}}</tool_call> b"}')]),
        )
    ],
    (
        '<tool_call>{"name": "add", "arguments": }</tool_call> b',
        '<tool_call>{"name": "add", "arguments": }</tool_call> b',
        [],
    ),
    (
        f'<tool_call>{{"name": "add", "arguments": {{"x": 1}} </tool_call> {TAGGED} }}',
        "}",
        [ToolCall("add", '{"x": 1}'), ADDED],
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"x": "Gra',
        "",
        [ToolCall("add", '{"x": "Gra')],
    ),
    (f"{TAGGED[:-3]}", "", [ADDED]),
    (f"{TAGGED}</tool_call", "</tool_call", [ADDED]),
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
    (ADD, "", [ADDED]),
    *[(text, "" if calls else text, calls) for text, calls in EITHER_KEY],
    (f" \n{LLAMA_ADD} ; {WEATHER}\n", "", [ADDED, ToolCall("get_weather", "{}")]),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (f"{LLAMA_ADD} and {WEATHER}", f"and {WEATHER}", [ADDED]),
    (f'{LLAMA_ADD};{{"name": "rm"}};{WEATHER}', f'{{"name": "rm"}};{WEATHER}', [ADDED]),
    ('{"name": "add", "para', '{"name": "add", "para', []),
    ("{" * 9000, "{" * 9000, []),
    (INFINITE, "", [ToolCall("add", '{"x": 1e999}')]),
    (" ", " ", []),
    (" " * 300 + WEATHER, " " * 300 + WEATHER, []),
]


# As their templates teach the models; and what these make of it.
OTHERS: dict[ToolCallForm, list[tuple[str, str, list[ToolCall]]]] = {
    ToolCallForm.QWEN3_XML: [
        (
            "I see.\n\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n"
            '<parameter=text>\nif a < b:\n    say("é")\n\n</parameter>\n</function>\n</tool_call>',
            "I see.",
            [ToolCall("add", '{"x": 1, "text": "if a < b:\\n    say(\\"é\\")\\n"}')],
        ),
        (
            "<tool_call><function=get_weather></function></tool_call>\n"
            "<tool_call><function=add><parameter=more>{'a': 1}</parameter>"
            "<parameter=text></parameter></function></tool_call> b",
            "b",
            [
                ToolCall("get_weather", "{}"),
                ToolCall("add", """{"more": "{'a': 1}", "text": ""}"""),
            ],
        ),
        # Of a value that may be a string, what is sound JSON of another type is no string.
        *[
            (
                f"<tool_call><function=add><parameter=more>{value}</parameter></function>",
                "",
                [ToolCall("add", f'{{"more": {written}}}')],
            )
            for value, written in (
                ("null", "null"),
                ('{"a": [1]}', '{"a": [1]}'),
                ("12", '"12"'),
                ('"12"', '"\\"12\\""'),
            )
        ],
        # Nothing is known of these; what no schema says may be anything.
        *[
            (
                f"<tool_call><function=get_weather><parameter=a>{value}</parameter></function>",
                "",
                [ToolCall("get_weather", f'{{"a": {written}}}')],
            )
            for value, written in (
                ("True", "true"),
                ("None", "null"),
                ("Oslo", '"Oslo"'),
                ("1e5", "1e5"),
                ("[1, 2,]", "[1, 2]"),
                ("", '""'),
            )
        ],
        # What is not of the form belongs to a call that has begun.
        (
            "<tool_call><function=add> so <b> <parameter=x>1</parameter></function>",
            "",
            [ToolCall("add", '{"x": 1}')],
        ),
        ("<tool_call><function=add></tool_call>b", "b", [ToolCall("add", "{}")]),
        # A value may hold tags: it ends where what follows belongs to a call.
        (
            "<tool_call><function=add><parameter=text></parameter> x </function> <parameter=y> "
            "</tool_call></parameter></function></tool_call>",
            "",
            [ToolCall("add", '{"text": "</parameter> x </function> <parameter=y> </tool_call>"}')],
        ),
        (
            f"<tool_call><function=add><parameter=text>a</parameter>{' ' * 700}</function>"
            "<parameter=x>1</parameter></function></tool_call>",
            "",
            [
                ToolCall(
                    "add",
                    json.dumps({"text": f"a</parameter>{' ' * 700}</function><parameter=x>1"}),
                )
            ],
        ),
        # Ends that a model left out.
        *[
            (
                f"<tool_call><function=add><parameter=x>\n1\n{rest}",
                "",
                [ToolCall("add", '{"x": 1}')],
            )
            for rest in (
                "</parameter></tool_call>",
                "</function>\n</tool_call>",
                "</parameter>\n</function>\n",
                "</parameter>\n",
                "</parameter>\n</func",
            )
        ],
        # Cut.
        (
            "<tool_call>\n<function=add>\n<parameter=text>\nGra</para",
            "",
            [ToolCall("add", '{"text": "Gra</para')],
        ),
        (
            "<tool_call>\n<function=add>\n<parameter=x>\n1",
            "",
            [ToolCall("add", '{"x": ')],
        ),
        # No call of a given tool.
        (
            "x <tool_call><function=rm></function></tool_call> y",
            "x <tool_call><function=rm></function></tool_call> y",
            [],
        ),
        ("the tag <tool_call> is", "the tag <tool_call> is", []),
        (
            f"<tool_call>{' z' * 400}<tool_call><function=get_weather></function></tool_call>",
            f"<tool_call>{' z' * 400}",
            [ToolCall("get_weather", "{}")],
        ),
        (TAGGED, "", [ADDED]),
    ],
    ToolCallForm.GLM45: [
        (
            "Hm.<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>text</arg_key>\n<arg_value>a\nb</arg_value>\n</tool_call>",
            "Hm.",
            [ToolCall("add", '{"x": 1, "text": "a\\nb"}')],
        ),
        ("<tool_call>get_weather\n</tool_call>", "", [ToolCall("get_weather", "{}")]),
        ("<tool_call>rm\n</tool_call>", "<tool_call>rm\n</tool_call>", []),
        (
            "<tool_call>get_weather</tool_call>\n<tool_call>add<arg_key>x</arg_key>"
            "<arg_value>-2</arg_value></tool_call>",
            "",
            [ToolCall("get_weather", "{}"), ToolCall("add", '{"x": -2}')],
        ),
    ],
    ToolCallForm.MISTRAL: [
        ('[TOOL_CALLS]add[ARGS]{"x": 1}', "", [ToolCall("add", '{"x": 1}')]),
        (
            'So. [TOOL_CALLS]add[CALL_ID]a1B2[ARGS]{"x": 1}[TOOL_CALLS]get_weather[ARGS]{} b',
            "So. b",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
        (f"[TOOL_CALLS][{ADD}, {WEATHER}]", "", [ADDED, ToolCall("get_weather", "{}")]),
        (f"[TOOL_CALLS] [{ADD}]\nb", "b", [ADDED]),
        ("[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
        ("[TOOL_CALLS", "[TOOL_CALLS", []),
        ('[TOOL_CALLS]add[ARGS]{"text": "a', "", [ToolCall("add", '{"text": "a')]),
        ("[TOOL_CALLS]add[ARGS]none", "none", [ToolCall("add", "{}")]),
    ],
    ToolCallForm.DEEPSEEK_V3: [
        (
            "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"x": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
            "get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So.",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"x": 1, "text": "<b> <｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>b',
            "b",
            [ToolCall("add", '{"x": 1, "text": "<b> <｜tool▁call▁end｜>"}')],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"x": [1<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [ToolCall("add", '{"x": [1]}')],
        ),
        # Of several, what is no given tool is left out.
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            '<｜tool▁call▁begin｜>rm<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
            '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [ToolCall("add", "{}"), ToolCall("add", '{"x": 2}')],
        ),
    ],
    ToolCallForm.KIMI_K2: [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_call_begin|>'
            "functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "",
            [ToolCall("add", '{"x": 1}'), ToolCall("get_weather", "{}")],
        ),
    ],
    ToolCallForm.PYTHONIC: [
        (
            """[add(x=1, text='a]("', more={"a": [None, true]}), get_weather()]""",
            "",
            [
                ToolCall("add", '{"x": 1, "text": "a](\\"", "more": {"a": [null, true]}}'),
                ToolCall("get_weather", "{}"),
            ],
        ),
        ("\n[get_weather()] b", "b", [ToolCall("get_weather", "{}")]),
        ("[1, 2]", "[1, 2]", []),
        *[
            (text, text, [])
            for text in (
                "See [add(x=1)]",
                "[add(1)]",
                "[add(x=y)]",
                "[add(x=f())]",
                "[add(x=1), rm()]",
                "[add(**{})]",
                "[add(x=(1,))]",
                "[add(x=1e999)]",
                "[add(x=1",
                "[add(x='a]",
                "[]",
                "[add(x=b'a')]",
                "[add(x=1, x=2)]",
                "[add(x=1 2)]",
                "[%s]" % ("-" * 2000 + "1"),
                "[add(x=[" + "1," * 3000 + "])]",
            )
        ],
    ],
}


def make_reader(form: ToolCallForm) -> OutputReader:
    return ToolCallParser(form, TOOLS)


def tags_of(form: ToolCallForm) -> tuple[str, str]:
    return ("", "") if form.marks is None else (form.marks.begin, form.marks.end)


def text_of(read: Read) -> str:
    return "".join(piece for piece in read.pieces if isinstance(piece, str))


def calls_of(read: Read) -> list[CallDelta]:
    return [piece for piece in read.pieces if isinstance(piece, CallDelta)]


def parse(form: ToolCallForm, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    reader = make_reader(form)
    reads = [reader.feed(piece) for piece in pieces]
    reads.append(reader.finish())
    deltas = [delta for read in reads for delta in calls_of(read)]
    return "".join(map(text_of, reads)), join(deltas)


def join(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    """The calls, as a client puts them together."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.arguments == "", "a call begins without arguments"
            calls.append(ToolCall(delta.name, ""))
        else:
            assert delta.arguments, "nothing is told"
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + delta.arguments)
    return calls


CASES = [
    *[(ToolCallForm.HERMES, *case) for case in HERMES],
    *[(ToolCallForm.LLAMA3_JSON, *case) for case in LLAMA],
    *[(form, *case) for form, those in OTHERS.items() for case in those],
]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_divided(
    form: ToolCallForm, text: str, shown: str, calls: list[ToolCall]
) -> None:
    assert parse(form, [text]) == (shown, calls)
    assert parse(form, list(text)) == (shown, calls)
    if len(text) < 1000:
        for first in range(len(text) + 1):
            for second in range(first, len(text) + 1, cases(7, 1)):
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
                "<function=add>",
                "<parameter=text>",
                "</parameter>",
                "</function>",
                "add<arg_key>x</arg_key>",
                "<arg_value>",
                "[TOOL_CALLS]",
                "add[ARGS]",
                "[add(x=1)]",
                "\n",
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
    assert parse(form, divided(text, cuts)) == parse(form, [text])


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(places)]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Half a surrogate pair is written with an escape, and is no text otherwise.
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.just("</tool_call>"),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values),
    max_leaves=8,
)


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[str, ToolCall]:
    """A call as a model may write it, and what it says."""
    name = draw(st.sampled_from(list(TOOLS)))
    given: dict[str, Any] = draw(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3))
    options: dict[str, Any] = {
        "indent": draw(st.sampled_from([None, 1])),
        "ensure_ascii": draw(st.booleans()) or "\\ud" in json.dumps(given),
    }
    arguments = json.dumps(given, **options)
    key = draw(st.sampled_from(["arguments", "parameters"]))
    members = [f'"name": {json.dumps(name)}', f'"{key}":{arguments}']
    members.append(f'"more": {json.dumps(draw(JSON_VALUES))}')
    body = f" {{{' , '.join(draw(st.permutations(members)))} }}"
    return body, ToolCall(name, arguments)


@hypothesis.given(st.data(), st.sampled_from(list(ToolCallForm)))
def test_well_written_calls_are_found_with_the_arguments_as_written(
    data: st.DataObject, form: ToolCallForm
) -> None:
    expected = []
    text = shown = ""
    for body, call in data.draw(st.lists(written_calls(), max_size=3)):
        begin, end = tags_of(form)
        if begin:
            before = data.draw(st.sampled_from(["", "I see.", "1 < 2"]))
            text += f"{before} {begin}{body}{end}"
            shown += before
        else:
            text += f"{body} ;"
        expected.append(call)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    assert parse(form, divided(text, cuts)) == (shown, expected)


@pytest.mark.parametrize(
    ("form", "text", "begins_after"),
    [
        (ToolCallForm.HERMES, TAGGED, '<tool_call>\n{"name": "add", "arguments": {'),
        (ToolCallForm.LLAMA3_JSON, LLAMA_ADD, '{"name": "add", "parameters": {'),
        (ToolCallForm.LLAMA3_JSON, ADD, '{"name": "add", "arguments": {'),
        (
            ToolCallForm.LLAMA3_JSON,
            '{"parameters": {"x": 1}, "name": "add"}',
            '{"parameters": {"x": 1}, "name": "add"',
        ),
    ],
)
def test_a_call_is_told_with_the_text_that_makes_it_certain_and_its_arguments_as_they_come(
    form: ToolCallForm, text: str, begins_after: str
) -> None:
    _, [whole] = parse(form, [text])
    reader = make_reader(form)
    deltas: list[CallDelta] = []
    for end in range(1, len(text) + 1):
        deltas += calls_of(reader.feed(text[end - 1]))
        if end < len(begins_after):
            assert deltas == []
            continue
        [call] = join(deltas)
        # All that there is, but for a number that may go on, or a comma or quote that depends on
        # what follows.
        begin = text.index(whole.arguments)
        assert whole.arguments.startswith(call.arguments)
        assert call.arguments
        assert begin + len(call.arguments) >= min(end, begin + len(whole.arguments)) - 2
    assert join(deltas) == [whole]


@pytest.mark.parametrize("form", list(ToolCallForm))
def test_what_is_held_back_is_bounded(form: ToolCallForm) -> None:
    begin = tags_of(form)[0] + ("[f(" if form is ToolCallForm.PYTHONIC else '{"')
    reader = make_reader(form)
    fed = shown = 0
    for piece in [begin, *["x" * 1000] * 200]:
        fed += len(piece)
        read = reader.feed(piece)
        assert calls_of(read) == []
        shown += len(text_of(read))
        assert fed - shown < 70_000
    assert shown > 100_000


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("form", list(ToolCallForm))
def test_the_arguments_of_a_call_that_is_certain_have_no_bound(
    form: ToolCallForm, key: str
) -> None:
    begin = tags_of(form)[0]
    arguments = json.dumps({"text": "x" * 200_000})
    text = f'{begin}{{"name": "add", "{key}": {arguments}}}'
    assert parse(form, divided(text, range(0, len(text), 7))) == ("", [ToolCall("add", arguments)])
    # Before it is certain there is one.
    text = f'{begin}{{"{key}": {arguments}, "name": "add"}}'
    assert parse(form, divided(text, range(0, len(text), 7))) == (text, [])


class Piece(str):
    """A piece of text that counts how many characters it is added to."""

    num_copied = 0

    def __radd__(self, other: str) -> str:
        Piece.num_copied += len(other)
        return str(other) + str(self)


@pytest.mark.parametrize("begin", ["<tool_call>", '<tool_call>{"', "", "{"])
@pytest.mark.parametrize("form", list(ToolCallForm))
def test_held_text_is_not_copied_with_every_piece(form: ToolCallForm, begin: str) -> None:
    reader = make_reader(form)
    reader.feed(begin)
    Piece.num_copied = 0
    pieces = [Piece(" ")] * 20_000
    for piece in pieces:
        reader.feed(piece)
    # White space and a tag that may belong to a call are.
    assert Piece.num_copied <= 270 * len(pieces)


@pytest.mark.parametrize(("parser", "text"), [(HermesParser, TAGGED), (Llama3Parser, LLAMA_ADD)])
def test_a_text_can_be_read_for_calls_alone(
    parser: type[HermesParser | Llama3Parser], text: str
) -> None:
    reader = parser(list(TOOLS))
    assert join([*calls_of(reader.feed(text)), *calls_of(reader.finish())]) == [ADDED]


def test_the_form_is_that_which_the_template_teaches() -> None:
    llama = '{"name": name, "parameters": values} Environment: ipython'
    assert form_of_template(llama) is ToolCallForm.LLAMA3_JSON
    assert form_of_template("{{ messages }}") is None


@pytest.mark.parametrize(
    ("form", "source"),
    [
        (ToolCallForm.HERMES, "<tool_call>{{ call }}</tool_call>"),
        (ToolCallForm.HERMES, '{{- \'<tool_call>\\n{"name": "\' }}{{ tool_call.name }}'),
        (ToolCallForm.HERMES, "{{- '<tool_call>\\n' }}\n{{- '{\"name\": \"' + name }}"),
        (ToolCallForm.HERMES, 'write <tool_call>\n{\\"arguments\\": <args>}'),
        (
            ToolCallForm.HERMES,
            'within <tool_call></tool_call> tags:\n<tool_call>\n{"name": <name>}\n</tool_call>',
        ),
        (ToolCallForm.HERMES_LIST, '<tool_call>[{"name": ..., "arguments": ...}]</tool_call>'),
        (
            ToolCallForm.HERMES,
            "{{ '<tool_call>\\n' }}\n{%- if call %}{%- endif %}{{- '{' }}\n{{- '\"name\": \"' }}",
        ),
        (None, "{{ '<tool_call>' }}{{ call.name }}{{ call.arguments }}"),
        (ToolCallForm.QWEN3_XML, "<tool_call><function=f></function></tool_call>"),
        (ToolCallForm.GLM45, "<tool_call>\n{{ name }}\n<arg_key>{{ key }}</arg_key><arg_value>"),
        (
            ToolCallForm.GLM45,
            "write <tool_call>{function-name}\n<arg_key>{key}</arg_key></tool_call>",
        ),
        (ToolCallForm.MISTRAL, "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' }}"),
        (ToolCallForm.DEEPSEEK_V3, "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}"),
        (ToolCallForm.KIMI_K2, "{{ '<|tool_calls_section_begin|>' }}"),
        (ToolCallForm.PYTHONIC, "return [func_name1(params_name1=params_value1), func_name2()]"),
        (None, '<tool_call><invoke name="f"></invoke></tool_call>'),
        (None, "{{ '<tool_call>' + call.name + '(' + call.arguments + ')</tool_call>' }}"),
        (None, "<tool_call>name: f, x: 1</tool_call>"),
    ],
)
def test_tags_alone_do_not_tell_the_form(form: ToolCallForm | None, source: str) -> None:
    assert form_of_template(source) is form
