"""However a text is cut into pieces, stop strings end it where a search of the whole would."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Read, Reading
from gateway.text.output.stop_strings import StopStrings

# Few letters, so that prefixes of stop strings are frequent.
TEXTS = st.text(alphabet="ab\N{SNOWMAN}", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\N{SNOWMAN}", min_size=1, max_size=5), max_size=4)


def search(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle: tries every end of the text, shortest first."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def reader_of(stops: list[str]) -> OutputReader:
    return OutputReader(Reading(), StopStrings(stops))


def text_of(read: Read) -> str:
    return "".join(map(str, read.pieces))


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_a_stream_shows_what_a_search_of_the_whole_text_would(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    watched = reader_of(stops)
    shown = ""
    for piece in pieces_of(text, cuts):
        shown += text_of(watched.feed(piece))
        if watched.stopped:
            break
    else:
        shown += text_of(watched.finish())
    assert (shown, watched.stopped) == search(text, stops)


@given(text=TEXTS, stops=STOPS, num_early=st.integers(0, 30))
def test_strings_that_are_complete_too_early_do_not_count(
    text: str, stops: list[str], num_early: int
) -> None:
    watched = reader_of(stops)
    shown = ""
    for index, character in enumerate(text):
        shown += text_of(watched.feed(character, counts_stops=index >= num_early))
        if watched.stopped:
            break
    else:
        shown += text_of(watched.finish())
    ends = [end for end in range(num_early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert watched.stopped is bool(stops and ends)
    if watched.stopped:
        begun = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert shown == text[: ends[0] - begun]
    else:
        assert shown == text
