"""The draft of one text, once the occurrences of its longest n-gram are known.

Owns which of them is continued, and for how many tokens. They are found by `match.py` (the index)
or `kmp.py` (a scan), with the same result.

`TIE_LONGEST`. Three places compete: the earliest end of the longest matching n-gram, its latest
end, and the place that the running copy has reached: the last accepted draft was copied from
`distance` tokens before the end of the text, and so is this place. The one with the longest match
wins, counted up to 64 tokens; of equal ones the latest in the text. A draft counts as accepted when
the text went on with its first token. Under disjoint, the running copy must lie at least n tokens
before the end.
"""

from drafter.ngram.match import measure_match
from drafter.ngram.table import (
    ACCEPTED_DISTANCE,
    DISJOINT,
    DRAFT_DISTANCE,
    DRAFTED_AT,
    LATEST,
    LENGTH,
    LONGEST,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, store_i64, store_u32

MAX_MATCH_LENGTH = 64
"""How far back a match is followed; a longer one counts as this long."""


@kernel
def write_draft(
    header: int, size: int, earliest: int, latest: int, room: int, draft: int
) -> tuple[int, int]:
    """Writes a draft: the tokens after the place that wins.

    Args:
        header: address of the text.
        size: n of the longest match; 0: nothing matches.
        earliest, latest: its ends.
        room: most tokens of a draft, >= 1.
        draft: address that the tokens are written to.

    Returns:
        (number of tokens, length of the match).
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    tie = load_i64(header + 8 * TIE)
    if tie == LONGEST:
        note_accepted(header)
    if size == 0:
        return 0, 0
    place = latest if tie == LATEST else earliest
    match_length = measure_match(tokens, length, place, MAX_MATCH_LENGTH)
    if tie == LONGEST:
        if latest != earliest:
            other = measure_match(tokens, length, latest, MAX_MATCH_LENGTH)
            if other >= match_length:
                place, match_length = latest, other
        distance = load_i64(header + 8 * ACCEPTED_DISTANCE)
        # Otherwise there is no copy, or its source lies within the suffix.
        if distance != 0 and (distance >= size or load_i64(header + 8 * DISJOINT) == 0):
            running = length - distance
            other = measure_match(tokens, length, running, MAX_MATCH_LENGTH)
            if other > match_length or (other == match_length and running > place):
                place, match_length = running, other
        store_i64(header + 8 * DRAFT_DISTANCE, length - place)
        store_i64(header + 8 * DRAFTED_AT, length)
        tokens_per_match = load_i64(header + 8 * TOKENS_PER_MATCH)
        if tokens_per_match > 0:
            room = min(room, tokens_per_match * match_length)
    count = min(room, length - place)
    for i in range(count):
        store_u32(draft + 4 * i, load_u32(tokens + 4 * (place + i)))
    return count, match_length


@kernel
def note_accepted(header: int) -> None:
    """Remembers where the last draft was copied from, if the text went on with its first token."""
    drafted_at = load_i64(header + 8 * DRAFTED_AT)
    distance = load_i64(header + 8 * DRAFT_DISTANCE)
    if distance == 0 or drafted_at >= load_i64(header + 8 * LENGTH):
        return
    tokens = load_i64(header + 8 * TOKENS)
    if load_u32(tokens + 4 * drafted_at) == load_u32(tokens + 4 * (drafted_at - distance)):
        store_i64(header + 8 * ACCEPTED_DISTANCE, distance)
    store_i64(header + 8 * DRAFT_DISTANCE, 0)
