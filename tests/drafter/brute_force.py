"""The law of a proposal read word for word, in lists and loops: the oracle of every proposer.

For n from max_ngram down to min_ngram, the pattern is the last n of L tokens. Its earlier
occurrence [s, s + n) ends at or before L - n (disjoint), or is only not the suffix itself
(allowed). The first n that matches wins; the draft is what followed it, at most
`max_draft_tokens`, never past the known tokens. Under TIE_LONGEST three places compete by how far
back they match, and past proposals matter: `Drafter` remembers them.
"""

from collections.abc import Sequence

from drafter.ngram.params import NgramParams, Overlap, Tie

MAX_REACH = 64
MAX_CHAINED = 64


def propose(
    context: Sequence[int], params: NgramParams, max_draft_tokens: int
) -> tuple[list[int], int] | None:
    """Returns (draft, reach), or None if nothing matches; of a text never asked about before."""
    return Drafter(params).propose(context, max_draft_tokens)


class Drafter:
    """Asked about one growing text again and again."""

    def __init__(self, params: NgramParams) -> None:
        self.params = params
        # The last draft: what it was, where it was copied from, and how long the text was.
        self._draft: list[int] = []
        self._place = 0
        self._length = 0
        # The last draft whose first token the text went on with.
        self._accepted_distance: int | None = None

    def propose(
        self, context: Sequence[int], max_draft_tokens: int
    ) -> tuple[list[int], int] | None:
        """Returns (draft, reach), or None if nothing matches."""
        context, params = list(context), self.params
        if self._draft and len(context) > self._length:
            if context[self._length] == self._draft[0]:
                self._accepted_distance = self._length - self._place
            self._draft = []
        found = find_place(context, params, self._accepted_distance)
        if found is None:
            return None
        place, first_reach = found
        most = max_draft_tokens
        if params.tie is Tie.LONGEST and params.tokens_per_match:
            most = min(most, params.tokens_per_match * first_reach)
        draft = context[place : place + most]
        self._draft, self._place, self._length = draft, place, len(context)
        if params.chained:
            most = min(most, len(draft) + MAX_CHAINED)
            distance = len(context) - place
            while len(draft) < most:
                longer = context + draft
                found = find_place(longer, params, distance)
                if found is None:
                    break
                piece = longer[found[0] : found[0] + most - len(draft)]
                distance = len(longer) - found[0]
                draft = draft + piece
        return draft, first_reach


def find_place(
    context: list[int], params: NgramParams, copy_distance: int | None
) -> tuple[int, int] | None:
    """Returns (where the draft starts, reach)."""
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
        reach, place = max((reach_of(context, place), place) for place in places)
        return place, reach
    return None


def reach_of(context: list[int], place: int) -> int:
    """How many tokens before `place` agree with those before the end, counted up to 64."""
    reach = 0
    while (
        reach < MAX_REACH
        and reach < place
        and context[place - 1 - reach] == context[len(context) - 1 - reach]
    ):
        reach += 1
    return reach
