"""Reasoning in tags is told from the answer, however the text is cut in pieces."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.reasoning import BEGIN, END, ReasoningReader, is_taught

TEXTS = st.lists(
    st.sampled_from([BEGIN, END, "<", "<think", "</th", "ink>", ">", " ", "\n", "a", "b c", "é"]),
    max_size=8,
).map("".join)


def read(text: str, cuts: list[int], prompt_end: str = "") -> tuple[str, str]:
    """The reasoning and the answer of a text that comes in pieces."""
    reader = ReasoningReader(prompt_end)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [reader.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    pieces.append(reader.finish())
    return "".join([reasoning for reasoning, _ in pieces]), "".join([text for _, text in pieces])


def told_apart(text: str, has_begun: bool) -> tuple[str, str]:
    """The same of the whole text at once."""
    if not has_begun:
        tag = re.match(rf"\s*{BEGIN}", text)
        if tag is None:
            return "", text
        text = text[tag.end() :]
    reasoning, tag_text, answer = text.lstrip().partition(END)
    return (reasoning.rstrip(), answer.lstrip()) if tag_text else (reasoning, "")


@given(TEXTS, st.lists(st.integers(0, 100), max_size=20), st.booleans())
def test_pieces_are_read_as_the_whole_text_is(text: str, cuts: list[int], has_begun: bool) -> None:
    prompt_end = f"<|assistant|>{BEGIN}\n" if has_begun else f"{BEGIN}\n\n{END}\n\n"
    assert read(text, cuts, prompt_end) == told_apart(text, has_begun)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        ("<think></think>Yes.", ("", "Yes.")),
        ("Yes. <think>no</think>", ("", "Yes. <think>no</think>")),
        ("<think>It ends here", ("It ends here", "")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
    ],
)
def test_what_stands_in_tags_at_the_beginning_is_reasoning(
    text: str, expected: tuple[str, str]
) -> None:
    assert read(text, []) == read(text, list(range(len(text)))) == expected


@pytest.mark.parametrize("prompt_end", ["", f"x{BEGIN}"])
def test_endless_white_space_is_not_held_back(prompt_end: str) -> None:
    reader = ReasoningReader(prompt_end)
    reader.feed("x" if prompt_end else "")
    shown = sum(len(part) for _ in range(1000) for part in reader.feed("\n"))
    assert shown >= 1000 - 66


def test_templates_that_close_the_tag_know_reasoning() -> None:
    assert is_taught("{{ message.content.split('</think>')[-1] }}")
    assert not is_taught("{{ message.content }}")
