"""Tokens to text, up to a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.detokenizer import REPLACEMENT, ByteDetokenizer
from gateway.text.output.output_text import OutputText
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text.test_tokenizer import ADDED, BUNDLED, METASPACE, SENTENCEPIECE


def test_a_stop_string_is_found_early_in_a_long_output_that_was_given(
    tokenizer: Tokenizer,
) -> None:
    text = OutputText(tokenizer.detokenizer(), ["b"])
    text.skip(tokenizer.encode("ab") + tokenizer.encode("a") * 10_000)
    assert text.stopped


@given(
    text=st.text(alphabet="ab é日", max_size=20),
    stop=st.text(alphabet="ab é日", min_size=1, max_size=4),
    step=st.integers(1, 6),
)
def test_where_the_output_ends_does_not_depend_on_the_steps(
    text: str, stop: str, step: int
) -> None:
    ids = BUNDLED.encode(text)
    whole, stepwise = (OutputText(BUNDLED.detokenizer(), [stop]) for _ in range(2))
    expected = whole.feed(ids)
    shown, num_tokens = "", 0
    for start in range(0, len(ids), step):
        part = stepwise.feed(ids[start : start + step])
        shown += part.text
        num_tokens += part.num_tokens
        if stepwise.stopped:
            break
    assert (shown, num_tokens) == expected[:2]
    assert stepwise.stopped == whole.stopped == (stop in text)


def ends(text: str, stops: list[str], min_tokens: int) -> tuple[str, int, bool]:
    """The oracle, where each token is a character: what is shown, of how many tokens."""
    for end in range(min_tokens + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], end, True
    return text, len(text), False


@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 14),
    num_given=st.integers(0, 12),
    step=st.integers(1, 5),
)
def test_a_stop_string_that_a_token_before_min_tokens_completes_is_text(
    text: str, stops: list[str], min_tokens: int, num_given: int, step: int
) -> None:
    ids = [BUNDLED.encode(character)[0] for character in text]
    output = OutputText(BUNDLED.detokenizer(), stops, min_tokens=min_tokens)
    output.skip(ids[:num_given])
    output = output.copy()
    num_tokens = len(ids[:num_given])
    shown = ""
    for start in range(num_given, len(ids), step):
        if output.stopped:
            break
        part = output.feed(ids[start : start + step])
        shown += part.text
        num_tokens += part.num_tokens
    expected, num_expected, is_stopped = ends(text, stops, min_tokens)
    assert output.stopped == is_stopped
    if not is_stopped:
        shown += output.finish().text
    if not num_given:
        assert (shown, num_tokens) == (expected, num_expected)
    assert expected.endswith(shown)


@pytest.mark.parametrize(
    ("stop", "shown", "is_stopped"),
    [("ab", f"a{REPLACEMENT}", False), ("a" + REPLACEMENT, "", True)],
)
def test_an_incomplete_character_comes_behind_the_text_that_was_held_back(
    stop: str, shown: str, is_stopped: bool
) -> None:
    text = OutputText(ByteDetokenizer(lambda token_id: bytes([token_id])), [stop])
    assert text.feed(b"xa\xe2").text == "x"
    assert text.finish().text == shown
    assert text.stopped is is_stopped


def held_back(text: str, stops: list[str]) -> int:
    """How many characters at the text's end may begin a stop string."""
    sizes = range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@given(
    text=st.text(alphabet="ab é日\N{GRINNING FACE}", max_size=20),
    stops=st.lists(st.text(alphabet="ab é日", min_size=1, max_size=4), max_size=2),
    step=st.integers(1, 6),
)
def test_each_token_has_the_text_that_is_certain_since_it(
    text: str, stops: list[str], step: int
) -> None:
    ids = BUNDLED.encode(text)
    output = OutputText(BUNDLED.detokenizer(), stops, reports_tokens=True)
    texts: list[str] = []
    for start in range(0, len(ids), step):
        texts += output.feed(ids[start : start + step]).token_texts
        if output.stopped:
            break
    for index in range(len(texts)):
        known = b"".join(map(BUNDLED.token_bytes, ids[: index + 1]))
        # Without the bytes of a character that is not whole.
        certain = known.decode(errors="ignore")
        ends = [certain.find(stop) + len(stop) for stop in stops if stop in certain]
        if ends:
            first = min(ends)
            longest = max(len(stop) for stop in stops if certain[:first].endswith(stop))
            certain = certain[: first - longest]
        else:
            certain = certain[: len(certain) - held_back(certain, stops)]
        assert "".join(texts[: index + 1]) == certain


@pytest.mark.parametrize("tokenizer", [BUNDLED, ADDED, SENTENCEPIECE, *METASPACE])
@given(data=st.data())
def test_reported_texts_join_to_the_text_without_reports(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    size = tokenizer._tokenizer.get_vocab_size()
    # Also bytes that are no text.
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    stops = data.draw(st.lists(st.text(alphabet="the cats", min_size=1, max_size=3), max_size=2))
    step = data.draw(st.integers(1, 9))
    told = OutputText(tokenizer.detokenizer(), stops, reports_tokens=True)
    plain = OutputText(tokenizer.detokenizer(), stops)
    for start in range(0, len(ids), step):
        shown = told.feed(ids[start : start + step])
        assert shown._replace(token_texts=()) == plain.feed(ids[start : start + step])
        assert "".join(shown.token_texts) == shown.text
        assert len(shown.token_texts) == shown.num_tokens
        if told.stopped:
            break
        told, plain = told.copy(), plain.copy()
    assert told.stopped == plain.stopped
    if not told.stopped:
        assert told.finish().text == plain.finish().text
