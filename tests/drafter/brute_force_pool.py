"""The law of a pool's draft read word for word, in lists and loops: the oracle of pools.

A pool is a list of texts in the order they were fed. For n from max_ngram down to min_ngram, the
pattern is the last n tokens of the context; an occurrence counts if a token of the same text
follows it. The first n that occurs wins.
"""

from collections.abc import Sequence

from drafter.ngram_table import EARLIEST, LATEST, LONGEST


def find(
    texts: Sequence[Sequence[int]],
    context: Sequence[int],
    *,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_draft_tokens: int,
) -> tuple[list[int], int] | None:
    """Returns (draft, reach), or None if nothing matches."""
    context = list(context)
    for n in range(max_ngram, min_ngram - 1, -1):
        if n > len(context):
            continue
        pattern = context[len(context) - n :]
        places = [
            (list(text), s + n)
            for text in texts
            for s in range(len(text) - n)  # s + n < len(text): a token follows
            if list(text[s : s + n]) == pattern
        ]
        if places:
            text, place = _choose(places, context, tie)
            draft = text[place : place + max_draft_tokens]
            return draft, reach_of(text, place, context)
    return None


def _choose(
    places: list[tuple[list[int], int]], context: list[int], tie: int
) -> tuple[list[int], int]:
    earliest, latest = places[0], places[-1]
    if tie == EARLIEST:
        return earliest
    if tie == LATEST:
        return latest
    assert tie == LONGEST
    return earliest if reach_of(*earliest, context) > reach_of(*latest, context) else latest


def reach_of(text: list[int], place: int, context: list[int]) -> int:
    """How many tokens before `place` agree with the end of the context, counted up to 64."""
    reach = 0
    while reach < min(64, place, len(context)) and text[place - 1 - reach] == context[-1 - reach]:
        reach += 1
    return reach
