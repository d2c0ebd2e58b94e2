"""The rules of a pool's draft in lists and loops: the oracle of pools.

A pool is a list of texts in the order they were fed. For n from max_ngram down to min_ngram, the
pattern is the last n tokens of the context; an occurrence counts if a token of the same text
follows it. The first n that occurs wins.
"""

from collections.abc import Sequence

from drafter.ngram.table import EARLIEST, LATEST, LONGEST

Place = tuple[Sequence[int], int]


def find(
    texts: Sequence[Sequence[int]],
    context: Sequence[int],
    *,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_draft_tokens: int,
) -> tuple[list[int], int] | None:
    """Returns (draft, match length), or None if nothing matches."""
    context = list(context)
    for n in range(max_ngram, min_ngram - 1, -1):
        if n > len(context):
            continue
        pattern = context[len(context) - n :]
        places = [
            (text, s + n)
            for text in texts
            for s in range(len(text) - n)  # s + n < its length: a token follows
            if list(text[s : s + n]) == pattern
        ]
        if places:
            text, place = _choose(places[0], places[-1], context, tie)
            draft = list(text[place : place + max_draft_tokens])
            return draft, match_length_at(text, place, context)
    return None


def _choose(earliest: Place, latest: Place, context: list[int], tie: int) -> Place:
    if tie == EARLIEST:
        return earliest
    if tie == LATEST:
        return latest
    assert tie == LONGEST
    match_lengths = [match_length_at(text, place, context) for text, place in (earliest, latest)]
    return earliest if match_lengths[0] > match_lengths[1] else latest


def match_length_at(text: Sequence[int], place: int, context: list[int]) -> int:
    """How many tokens before `place` agree with the end of the context, counted up to 64."""
    match_length = 0
    while (
        match_length < min(64, place, len(context))
        and text[place - 1 - match_length] == context[-1 - match_length]
    ):
        match_length += 1
    return match_length
