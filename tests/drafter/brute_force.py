"""The rules of a proposal in lists and loops: the oracle of every proposer.

For n from max_ngram down to min_ngram, the pattern is the last n of L tokens. Its earlier
occurrence [s, s + n) ends at or before L - n (disjoint), or is any but the suffix itself
(allowed). The first n that matches wins; the draft is the tokens that followed it, at most
`max_draft_tokens`, never past the known tokens. Under TIE_LONGEST three places compete by their
match lengths, and one of them depends on earlier proposals: `Drafter` remembers them.
"""

from collections.abc import Sequence

from drafter.ngram.params import NgramParams, Overlap, Tie

MAX_MATCH_LENGTH = 64


def propose(
    context: Sequence[int], params: NgramParams, max_draft_tokens: int
) -> tuple[list[int], int] | None:
    """Returns (draft, match length), or None if nothing matches, for a text's first proposal."""
    return Drafter(params).propose(context, max_draft_tokens)


class Drafter:
    """Makes all proposals for one growing text."""

    def __init__(self, params: NgramParams) -> None:
        self.params = params
        # The last draft: its tokens, where it was copied from, and how long the text was.
        self._draft: list[int] = []
        self._place = 0
        self._length = 0
        # Of the last draft whose first token was accepted.
        self._accepted_distance: int | None = None

    def propose(
        self, context: Sequence[int], max_draft_tokens: int
    ) -> tuple[list[int], int] | None:
        """Returns (draft, match length), or None if nothing matches."""
        context, params = list(context), self.params
        if self._draft and len(context) > self._length:
            if context[self._length] == self._draft[0]:
                self._accepted_distance = self._length - self._place
            self._draft = []
        found = find_place(context, params, self._accepted_distance)
        if found is None:
            return None
        place, match_length = found
        max_tokens = max_draft_tokens
        if params.tie is Tie.LONGEST and params.tokens_per_match:
            max_tokens = min(max_tokens, params.tokens_per_match * match_length)
        draft = context[place : place + max_tokens]
        self._draft, self._place, self._length = draft, place, len(context)
        return draft, match_length


def find_place(
    context: list[int], params: NgramParams, copy_distance: int | None
) -> tuple[int, int] | None:
    """Returns (where the draft starts, match length)."""
    num_tokens = len(context)
    for n in range(params.max_ngram, params.min_ngram - 1, -1):
        if n > num_tokens:
            continue
        pattern = context[num_tokens - n :]
        starts = []
        for s in range(num_tokens - n):  # s = L - n is the suffix itself
            if params.overlap is Overlap.DISJOINT and s + n > num_tokens - n:
                continue
            if context[s : s + n] == pattern:
                starts.append(s)
        if not starts:
            continue
        if params.tie is Tie.EARLIEST:
            places = [starts[0] + n]
        elif params.tie is Tie.LATEST:
            places = [starts[-1] + n]
        else:
            places = [starts[0] + n, starts[-1] + n]
            if copy_distance is not None and copy_distance < num_tokens:
                place = num_tokens - copy_distance
                # Only if it is an occurrence of the n-gram that counts.
                if place - n in starts:
                    places.append(place)
        match_length, place = max((match_length_at(context, place), place) for place in places)
        return place, match_length
    return None


def match_length_at(context: list[int], place: int) -> int:
    """How many tokens before `place` agree with those before the end, counted up to 64."""
    match_length = 0
    while (
        match_length < MAX_MATCH_LENGTH
        and match_length < place
        and context[place - 1 - match_length] == context[len(context) - 1 - match_length]
    ):
        match_length += 1
    return match_length
