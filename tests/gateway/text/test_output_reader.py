"""Reasoning, calls and the answer are told apart, however the text is cut in pieces."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Piece, Read, Reading, ReasoningText
from gateway.text.output.stop_strings import StopStrings
from gateway.text.output.tool_call_form import ToolCallForm
from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.reasoning import THINK, Reasoning, reasoning_after
from tests.gateway.text.output_pieces import merged, reads_of

BEGIN, END = THINK.begin, THINK.end
TEXTS = st.lists(
    st.sampled_from([BEGIN, END, "<", "<think", "</th", "ink>", ">", " ", "\n", "a", "b c", "é"]),
    max_size=8,
).map("".join)
CUTS = st.lists(st.integers(0, 1000), max_size=20)
CALL = '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'
TOOLS: dict[str, dict[str, object]] = {"now": {}}


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def read_all(
    pieces: Sequence[str], reading: Reading, stops: Sequence[str] = ()
) -> tuple[OutputReader, list[Read]]:
    reader = OutputReader(reading, StopStrings(stops))
    return reader, reads_of(reader, pieces)


def told_apart(text: str, has_begun: bool) -> tuple[str, str]:
    """The oracle: the reasoning and the answer of the whole text at once, without calls."""
    if not has_begun:
        tag = re.match(rf"\s*{BEGIN}", text)
        if tag is None:
            return "", text
        text = text[tag.end() :]
    reasoning, tag_text, answer = text.lstrip().partition(END)
    return (reasoning.rstrip(), answer.lstrip()) if tag_text else (reasoning, "")


@given(TEXTS, CUTS, st.sampled_from(["", f"x{BEGIN}\n", f"{BEGIN}\n\n{END}\n\n"]), st.booleans())
def test_pieces_are_read_as_the_whole_text_is(
    text: str, cuts: list[int], prompt: str, has_tools: bool
) -> None:
    reasoning = reasoning_after(prompt, THINK)
    form, tools = (ToolCallForm.HERMES, TOOLS) if has_tools else (None, {})
    reading = Reading(reasoning=reasoning, form=form, tools=tools)
    _, reads = read_all(pieces_of(text, cuts), reading)
    expected = told_apart(text, reasoning is Reasoning.HAS_BEGUN)
    assert merged(reads) == [
        *([ReasoningText(expected[0])] if expected[0] else ()),
        *([expected[1]] if expected[1] else ()),
    ]


NOW = CallDelta("now", '{"x": 1}')
HM = ReasoningText("Hm.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # It counts, since no end of the reasoning follows it.
        (f"Hm.\n{CALL}", [HM, NOW]),
        (f"Hm.\n{CALL}\n{CALL} So.", [HM, NOW, NOW, "So."]),
        (f"Hm.\n{CALL[: CALL.index('1')]}", [HM, CallDelta("now", '{"x": ')]),
        # It is quoted.
        (f"Hm. {CALL} No.</think> Yes.", [ReasoningText(f"Hm. {CALL} No."), "Yes."]),
        (f"Hm. {CALL} No.</think>{CALL}", [ReasoningText(f"Hm. {CALL} No."), NOW]),
        # It is none.
        ("Hm. <tool_call> or", [ReasoningText("Hm. <tool_call> or")]),
        ("Hm. <tool_call", [ReasoningText("Hm. <tool_call")]),
        ('Hm. <tool_call>{"name": "n', [ReasoningText('Hm. <tool_call>{"name": "n')]),
        (
            f'Hm. <tool_call>{{"name": "rm"}}</tool_call>{CALL}',
            [ReasoningText('Hm. <tool_call>{"name": "rm"}</tool_call>'), NOW],
        ),
        (f"<tool_call> {CALL}", [ReasoningText("<tool_call>"), NOW]),
        (f"Hm.</think>\n{CALL}", [HM, NOW]),
    ],
)
def test_a_call_within_reasoning_counts_if_nothing_ends_the_reasoning_behind_it(
    text: str, expected: list[Piece]
) -> None:
    reading = Reading(reasoning=Reasoning.HAS_BEGUN, form=ToolCallForm.HERMES, tools=TOOLS)
    for first in range(len(text) + 1):
        for pieces in ([text[:first], text[first:]], [text[:first], *text[first:]]):
            assert merged(read_all(pieces, reading)[1]) == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected", "is_stopped"),
    [
        # What clients do not get as the answer holds no stop string.
        ("Stop? No.</think>\n\nI stop. Now", "op", [ReasoningText("Stop? No."), "I st"], True),
        ("Hm.\n\n</think>\n\nYes.\n\nNo.", "\n\n", [HM, "Yes."], True),
        (f"Hm.</think>{CALL}\nYes", "\n", [HM, NOW, "Yes"], False),
        (f"Hm.</think>{CALL}x", "1}", [HM, NOW, "x"], False),
        (f"{CALL}", "{", [NOW], False),
        (f"Hm.\n\n{CALL}", "\n\n", [HM, NOW], False),
        # White space before a call is the answer's while it is not known what follows.
        (f"Hm.</think>Yes.\n\n{CALL}", "\n\n", [HM, "Yes."], True),
        # Neither tag is the end of another string.
        ("</think>a<tool_call>b", "a<tool_call>", [], True),
        ("</think>a<tool_call>{]b", "]", ["a<tool_call>{"], True),
        ("</think>a<tool_call>{", "{", ["a<tool_call>"], True),
        ("</think>  <tool_call>x stop", "stop", ["<tool_call>x "], True),
    ],
)
def test_stop_strings_count_in_the_answer_alone(
    text: str, stop: str, expected: list[Piece], is_stopped: bool
) -> None:
    reading = Reading(reasoning=Reasoning.HAS_BEGUN, form=ToolCallForm.HERMES, tools=TOOLS)
    for pieces in ([text], list(text)):
        reader, reads = read_all(pieces, reading, [stop])
        assert merged(reads) == expected
        assert reader.stopped is is_stopped


ALL = st.lists(
    st.sampled_from(
        [BEGIN, END, CALL, "<tool_call>", "</tool_call>", "<", "{", "stop", "st", " ", "\n", "a"]
    ),
    max_size=8,
).map("".join)


# Behind it, calls are full of mistakes.
BEGUN = '<tool_call>{"name": "now", "arguments": {'
MISTAKES = st.lists(
    st.sampled_from(
        [*"\"'\\,:}][a1 \n<", "\\u00e9", "</tool", BEGUN, "</tool_call>", "</think>", '"x": ']
    ),
    max_size=12,
).map(lambda parts: "".join([BEGUN, *parts]))


@given(
    ALL | MISTAKES,
    CUTS,
    st.sampled_from(Reasoning),
    st.sampled_from([None, *ToolCallForm]),
    st.lists(st.sampled_from(["stop", "<", "\n\n", "a<"]), max_size=2),
)
def test_no_division_changes_what_is_read(
    text: str, cuts: list[int], reasoning: Reasoning, form: ToolCallForm | None, stops: list[str]
) -> None:
    reading = Reading(reasoning=reasoning, form=form, tools=TOOLS)
    whole, whole_reads = read_all([text], reading, stops)
    reader, reads = read_all(pieces_of(text, cuts), reading, stops)
    assert merged(reads) == merged(whole_reads)
    assert (reader.stopped, reader.place) == (whole.stopped, whole.place)


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        (["Hm", ".", "</think>", "\n\n", "Yes"], [1, 1, 1, 0, 0, 0]),
        (["Hm", ". <", "/think>\n", "\n", "Yes"], [1, 0, 2, 0, 0, 0]),
        (["Hm</think>Yes", "No"], [1, 0, 0]),
        # Whether a call is reasoning shows later.
        (["Hm", "<tool_call>", '{"name": "now"}', "</tool_call>"], [1, 0, 0, 0, 0]),
        (["Hm", "<tool_call>", " or", " not"], [1, 0, 2, 1, 0]),
        (["Hm", "<tool", "_call>", '{"name": "now", ', "</think>", "a"], [1, 0, 0, 0, 4, 0, 0]),
        (["Hm", "<tool_call>"], [1, 0, 1]),
        (["Hm", "<"], [1, 0, 1]),
    ],
)
def test_tokens_up_to_the_end_of_the_reasoning_are_counted(
    tokens: list[str], counts: list[int]
) -> None:
    reading = Reading(reasoning=Reasoning.HAS_BEGUN, form=ToolCallForm.HERMES, tools=TOOLS)
    _, reads = read_all(tokens, reading)
    assert [read.num_reasoning_tokens for read in reads] == counts


@pytest.mark.parametrize("reasoning", [Reasoning.MAY_BEGIN, Reasoning.HAS_BEGUN])
@pytest.mark.parametrize("form", [None, *ToolCallForm])
def test_endless_white_space_is_not_held_back(
    reasoning: Reasoning, form: ToolCallForm | None
) -> None:
    reader = OutputReader(Reading(reasoning=reasoning, form=form, tools=TOOLS), StopStrings())
    reader.feed("x")
    for _ in range(1000):
        reader.feed("\n")
    assert reader.num_held <= 256


def test_the_prompt_says_where_reasoning_stands() -> None:
    assert reasoning_after("<|assistant|>\n", THINK) is Reasoning.MAY_BEGIN
    assert reasoning_after("<|assistant|>\n<think>\n", THINK) is Reasoning.HAS_BEGUN
    assert reasoning_after("<|assistant|>\n<think>\n\n</think>\n\n", THINK) is Reasoning.IS_OVER


def test_a_call_within_reasoning_that_is_longer_than_what_is_held_back_counts() -> None:
    reading = Reading(reasoning=Reasoning.HAS_BEGUN, form=ToolCallForm.HERMES, tools=TOOLS)
    text = CALL.replace("1", '"' + "x" * 70_000 + '"') + "</think>"
    for step in (1, 7, 100_000):
        reader = OutputReader(reading, StopStrings())
        pieces = [text[first : first + step] for first in range(0, len(text), step)]
        reads = [reader.feed(piece) for piece in pieces]
        assert reader.num_held < 1000
        [call, rest] = merged([*reads, reader.finish()])
        assert call == CallDelta("now", '{"x": "' + "x" * 70_000 + '"}')
        assert rest == "</think>"
