"""Tokens to text, up to a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.output_text import OutputText
from gateway.text.tokenizer import Tokenizer
from tests.gateway.test_tokenizer import BUNDLED


def test_the_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(character)[0] for character in "abcdef"]
    text = OutputText(tokenizer.detokenizer(), ["cd"])
    assert text.feed(ids) == ("ab", 4)
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
    assert (shown, num_tokens) == expected
    assert stepwise.stopped == whole.stopped == (stop in text)


def test_held_back_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer.detokenizer(), ["abc"])
    assert text.feed(tokenizer.encode("xab")).text == "x"
    assert text.finish() == "ab"


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    text = OutputText(None, ())
    assert text.feed([1, 2, 3]) == ("", 3)
    assert text.finish() == ""
