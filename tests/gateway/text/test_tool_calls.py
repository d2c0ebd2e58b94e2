"""Tool calls in texts: what is a call, when it is shown, however the text is divided."""

# ruff: noqa: RUF001 - DeepSeek's marks have bars of full width.

import itertools
import json
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Read
from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.tool_calls import (
    ToolCallForm,
    ToolCallParser,
    form_of_template,
)
from tests.gateway.text.json_call_cases import (
    ADD,
    INFINITE,
    LLAMA_ADD,
    TAGGED,
    TOOLS,
    WEATHER,
    ToolCall,
)
from tests.gateway.text.tool_call_cases import CASES
from tests.volume import cases


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
                "<|tool_call|>",
                "<function_calls>",
                "add(x=1)",
                "</function_calls>",
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
        (
            ToolCallForm.GRANITE,
            "respond only with <|tool_call|> followed by a JSON list of tools used",
        ),
        (ToolCallForm.OLMO3, "{{ '<function_calls>' + message.function_calls }}"),
        (None, '<function_calls><invoke name="f"></invoke></function_calls>'),
        (None, '<tool_call><invoke name="f"></invoke></tool_call>'),
        (None, "{{ '<tool_call>' + call.name + '(' + call.arguments + ')</tool_call>' }}"),
        (None, "<tool_call>name: f, x: 1</tool_call>"),
    ],
)
def test_tags_alone_do_not_tell_the_form(form: ToolCallForm | None, source: str) -> None:
    assert form_of_template(source) is form
