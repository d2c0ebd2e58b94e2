"""The draft of one text: from its index at once, or from scans that may be made in pieces.

Owns the rules of a draft once the occurrences of the longest n-gram are known: which of them is
continued, and for how many tokens. Occurrences are found by `match.py`
(the index) or `kmp.py` (a scan), with the same result.

`TIE_LONGEST`. Three places compete: the earliest end of the longest matching n-gram, its latest
end, and the place that the running copy has reached: the last accepted draft was copied from
`distance` tokens before the end of the text, and so is this place. The one with the longest match
wins, counted up to 64 tokens; of equal ones the latest in the text. A draft counts as accepted when
the text went on with its first token. Under disjoint, the running copy must lie at least n tokens
before the end.
"""

import numpy as np
import numpy.typing as npt

from drafter.ngram.kmp import SCAN_WORDS, begin_scan, continue_scan, is_scan_done, scan_result
from drafter.ngram.match import choose, match
from drafter.ngram.table import (
    ACCEPTED_DISTANCE,
    DISJOINT,
    DRAFT_DISTANCE,
    DRAFTED_AT,
    LATEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, store_i64, store_u32

# Words of a scanned draft, after those of its scan: length of the text when it was begun, plus 1;
# number of its tokens; length of the match; the earliest end of the longest n-gram, while its
# latest end is searched for.
_CONTEXT, _COUNT, _MATCH_LENGTH, _EARLIEST_END, _IS_DONE = range(SCAN_WORDS, SCAN_WORDS + 5)
SCANNED_DRAFT_WORDS = SCAN_WORDS + 5
"""Int64 words that hold the progress of a scanned draft."""


@kernel
def write_draft(
    header: int, size: int, first: int, second: int, room: int, draft: int
) -> tuple[int, int]:
    """Writes a draft: the tokens after the match that wins.

    Args:
        header: address of the text.
        size: n of the longest match; 0: nothing matches.
        first: an end of it; the earliest with `TIE_LONGEST`.
        second: the latest, with `TIE_LONGEST`.
        room: most tokens of a draft, >= 1.
        draft: address that the tokens are written to.

    Returns:
        (number of tokens, length of the match).
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    tie = load_i64(header + 8 * TIE)
    copy_distance = 0
    if tie == LONGEST:
        copy_distance = load_i64(header + 8 * ACCEPTED_DISTANCE)
        drafted_at = load_i64(header + 8 * DRAFTED_AT)
        distance = load_i64(header + 8 * DRAFT_DISTANCE)
        if distance != 0 and drafted_at < length:
            accepted = load_u32(tokens + 4 * drafted_at)
            if accepted == load_u32(tokens + 4 * (drafted_at - distance)):
                copy_distance = distance
                store_i64(header + 8 * ACCEPTED_DISTANCE, distance)
            store_i64(header + 8 * DRAFT_DISTANCE, 0)
    if size == 0:
        return 0, 0
    place, match_length = choose(header, draft, length, size, first, second, copy_distance)
    if tie == LONGEST:
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
def draft_of(
    header: int,
    base: np.uint64,
    room: int,
    draft: int,
    pattern: npt.NDArray[np.uint32],
    candidates: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Writes a draft from the index of a text.

    Args:
        header: address of the text, which has an index.
        base: of the polynomial.
        room: most tokens of the draft, >= 1.
        draft: address that the tokens are written to.
        pattern, candidates: scratch, see `match`.

    Returns:
        (number of tokens, length of the match); (0, 0): nothing matches.
    """
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    longest = min(load_i64(header + 8 * MAX_NGRAM), length // 2 if disjoint else length - 1)
    if longest < load_i64(header + 8 * MIN_NGRAM):
        return 0, 0

    size, first, second = match(header, base, draft, length, pattern, candidates)
    return write_draft(header, size, first, second, room, draft)


@kernel
def scan_draft(header: int, room: int, draft: int, progress: int, budget: int) -> int:
    """Continues to write a draft by scans of the text.

    Args:
        header: address of the text. If it has grown since the last call, the draft begins anew.
        room: most tokens of the draft, >= 1.
        draft: address that the tokens are written to.
        progress: address of `SCANNED_DRAFT_WORDS` words; zeros in the first call.
        budget: how many tokens to examine, >= 1.

    Returns:
        How many were examined.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    if load_i64(progress + 8 * _CONTEXT) != length + 1:
        for i in range(SCANNED_DRAFT_WORDS):
            store_i64(progress + 8 * i, 0)
        store_i64(progress + 8 * _CONTEXT, length + 1)
        begin_scan(progress, length, min_ngram)
    spent = 0
    while load_i64(progress + 8 * _IS_DONE) == 0 and spent < budget:
        earliest = load_i64(progress + 8 * _EARLIEST_END)
        spent += 1 + continue_scan(
            progress, tokens, length, draft, length, min_ngram, max_ngram, disjoint,
            tie == LATEST or earliest != 0, budget - spent,
        )  # fmt: skip
        if not is_scan_done(progress):
            break
        second, size = scan_result(progress, length)
        if tie == LONGEST and size != 0 and earliest == 0:
            store_i64(progress + 8 * _EARLIEST_END, second)
            begin_scan(progress, length, min_ngram)
            continue
        first = second if earliest == 0 else earliest
        count, match_length = write_draft(header, size, first, second, room, draft)
        store_i64(progress + 8 * _COUNT, count)
        store_i64(progress + 8 * _MATCH_LENGTH, match_length)
        store_i64(progress + 8 * _IS_DONE, 1)
    return spent


@kernel
def scanned_draft(progress: int) -> tuple[bool, int, int]:
    """Returns (whether a draft is done, its number of tokens, length of its match)."""
    return (
        load_i64(progress + 8 * _IS_DONE) != 0,
        load_i64(progress + 8 * _COUNT),
        load_i64(progress + 8 * _MATCH_LENGTH),
    )
