"""How Gemma 4 writes calls and reasoning: as its template does."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Piece, Reading, ReasoningText
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_form import ToolCallForm, form_of_template
from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.reasoning import Reasoning, Tags, reasoning_after, tags_of_template
from tests.gateway.text.output_pieces import merged, reads_of

TEMPLATE = """{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}
{{- '<|channel>thought\n' + thinking_text + '\n<channel|>' -}}"""
TOOLS = {"add": {"x": {"type": "integer"}, "text": {"type": "string"}}, "now": {}}
QUOTE = '<|"|>'


def written(value: Any) -> str:
    """A value as the template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{written(arguments)}<tool_call|>"


def tags() -> Tags:
    found = tags_of_template(TEMPLATE)
    assert found is not None
    return found


def read(pieces: Sequence[str], reasoning: Reasoning = Reasoning.NONE) -> list[Piece]:
    """What is told, with what follows each other joined."""
    form = form_of_template(TEMPLATE)
    assert form is ToolCallForm.GEMMA4
    reader = OutputReader(
        Reading(reasoning=reasoning, tags=tags(), form=form, tools=TOOLS), StopStrings()
    )
    return merged(reads_of(reader, pieces))


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["<", "<|", '"', "<tool_call|>", "\\", "}", "it's", 'a "b": c', "<|tool_call>call:now{}"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS.filter(lambda text: QUOTE not in text),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=8,
)  # fmt: skip


@hypothesis.given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(st.integers(0, 300)))
def test_calls_have_the_arguments_as_written_however_the_text_is_divided(
    arguments: dict[str, Any], cuts: list[int]
) -> None:
    text = f"So: {call('add', arguments)}{call('now', {})}\nDone."
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for pieces in ([text[a:b] for a, b in itertools.pairwise(places)], [text], list(text)):
        before, added, now, behind = read(pieces)
        assert (before, behind) == ("So:", "\nDone.")
        assert isinstance(added, CallDelta)
        assert (added.name, json.loads(added.arguments)) == ("add", arguments)
        assert now == CallDelta("now", "{}")


@hypothesis.given(
    st.lists(
        st.sampled_from(
            ["<|tool_call>", "call:add{", "call:none{", "x:1", "text:", QUOTE, "a<b", ",", "}", "]",
             "<tool_call|>", "<|channel>thought\n", "<channel|>", " ", "\n", '{"name": "now"}',
             "<|", '|"|>']
        ),
        max_size=10,
    ).map("".join),
    st.sampled_from([Reasoning.NONE, Reasoning.MAY_BEGIN, Reasoning.HAS_BEGUN]),
)  # fmt: skip
def test_no_division_changes_what_is_found(text: str, reasoning: Reasoning) -> None:
    assert read(list(text), reasoning) == read([text], reasoning)


def test_a_call_that_is_cut_is_told_as_far_as_it_came() -> None:
    text = f'<|tool_call>call:add{{x:1,text:{QUOTE}a "b" <|"'
    assert read(list(text)) == [CallDelta("add", '{"x":1,"text":"a \\"b\\" <|\\"')]


def test_a_tool_that_is_not_given_stays_text() -> None:
    text = call("other", {"x": 1})
    assert read(list(text)) == [text]


@pytest.mark.parametrize(
    ("prompt", "output", "told"),
    [
        ("<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.",
         [ReasoningText("Hm."), "Yes."]),
        ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", ["Yes."]),
        ("<|turn>model\n<|channel>thought\n", "Hm.<channel|>Yes.", [ReasoningText("Hm."), "Yes."]),
        ("<|turn>model\n", f"<|channel>thought\nHm.\n<channel|>{call('now', {})}",
         [ReasoningText("Hm."), CallDelta("now", "{}")]),
    ],
)  # fmt: skip
def test_thoughts_are_told_from_the_answer(prompt: str, output: str, told: list[Piece]) -> None:
    reasoning = reasoning_after(prompt, tags())
    assert read([output], reasoning) == told
    assert read(list(output), reasoning) == told
