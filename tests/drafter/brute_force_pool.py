"""The rules of a pool's draft in lists and loops: the oracle of pools.

A pool is a list of texts in the order they were fed. For n from max_ngram down to min_ngram, the
pattern is the last n tokens of the context; an occurrence counts if a token of the same text
follows it. The first n that occurs wins.

A text that was fed while it grew is a list of pieces. Each begins with the last tokens of the one
before: they lengthen matches, but are no occurrences. A sequence is not drafted for from its own
pieces; if the earliest occurrence is in one, the latest of the others replaces it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

from drafter.ngram.table import EARLIEST, LATEST, LONGEST


@dataclass(eq=False)
class Piece:
    token_ids: list[int]
    num_overlap: int = 0
    owner: str = ""
    continued_by: Union["Piece", None] = None

    def tokens_from(self, place: int) -> list[int]:
        """The tokens that follow in this piece, and in those that continue it."""
        tokens, piece = self.token_ids[place:], self.continued_by
        while piece is not None:
            tokens = tokens + piece.token_ids[piece.num_overlap :]
            piece = piece.continued_by
        return tokens


Place = tuple[Piece, int]


def find(
    texts: Sequence[Sequence[int] | Piece],
    context: Sequence[int],
    *,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_draft_tokens: int,
    own: str = "",
) -> tuple[list[int], int] | None:
    """Returns (draft, match length), or None if nothing matches."""
    context = list(context)
    pieces = [text if isinstance(text, Piece) else Piece(list(text)) for text in texts]
    for n in range(max_ngram, min_ngram - 1, -1):
        if n > len(context):
            continue
        pattern = context[len(context) - n :]
        places = [
            (piece, s + n)
            for piece in pieces
            for s in range(len(piece.token_ids) - n)  # s + n < its length: a token follows
            if s + n >= piece.num_overlap and piece.token_ids[s : s + n] == pattern
        ]
        foreign = [place for place in places if not own or place[0].owner != own]
        if foreign:
            earliest = places[0] if places[0] in foreign else foreign[-1]
            piece, place = _choose(earliest, foreign[-1], context, tie)
            draft = piece.tokens_from(place)[:max_draft_tokens]
            return draft, match_length_at(piece.token_ids, place, context)
    return None


def _choose(earliest: Place, latest: Place, context: list[int], tie: int) -> Place:
    if tie == EARLIEST:
        return earliest
    if tie == LATEST:
        return latest
    assert tie == LONGEST
    match_lengths = [
        match_length_at(piece.token_ids, place, context) for piece, place in (earliest, latest)
    ]
    return earliest if match_lengths[0] > match_lengths[1] else latest


def match_length_at(text: list[int], place: int, context: list[int]) -> int:
    """How many tokens before `place` agree with the end of the context, counted up to 64."""
    match_length = 0
    while (
        match_length < min(64, place, len(context))
        and text[place - 1 - match_length] == context[-1 - match_length]
    ):
        match_length += 1
    return match_length
