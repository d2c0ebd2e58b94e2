"""Where a draft may be copied from: matches in the index and by scan, and which of them wins.

Owns how far a match reaches, and which candidate is taken; the words of the law are in
`proposal_kernel.py`. Where occurrences are found is known to `ngram_index.py` (the index) and
`kmp.py` (the scan): both give the same.
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.kernel_memory import load_i64, load_u32
from drafter.kmp import find_match
from drafter.ngram_index import (
    DISJOINT,
    EARLIEST,
    LATEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    NEXT_END,
    SHAPE,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    equal_tokens,
    find,
    find_in_chunk,
    last_end,
    mix,
    slot_bits_of,
)

MAX_REACH_TOKENS = 64
"""How far back a match is followed to say how good it is."""


@kernel
def token_at(tokens: int, length: int, draft: int, position: int) -> np.uint32:
    """Returns a token of text + draft."""
    if position < length:
        return load_u32(tokens + 4 * position)
    return load_u32(draft + 4 * (position - length))


@kernel
def reach_of(tokens: int, length: int, draft: int, end: int, place: int) -> int:
    """Returns how many tokens before `place` agree with those before `end`, up to 64."""
    most = min(place, MAX_REACH_TOKENS)
    reach = 0
    while reach < most and token_at(tokens, length, draft, place - 1 - reach) == token_at(
        tokens, length, draft, end - 1 - reach
    ):
        reach += 1
    return reach


@kernel
def choose(
    tokens: int,
    length: int,
    draft: int,
    end: int,
    size: int,
    first: int,
    second: int,
    copy_distance: int,
    disjoint: bool,
    tie: int,
) -> tuple[int, int]:
    """Returns (place, reach) of the candidate that wins.

    Args:
        tokens: address of the text.
        length: of the text.
        draft: address of the draft that follows it.
        end: of text and as much of the draft as there is.
        size: n of the longest match.
        first: an end of it; the earliest with `TIE_LONGEST`.
        second: the latest, with `TIE_LONGEST`.
        copy_distance: how far back the running copy reads; 0: there is none.
        disjoint: whether an occurrence must not overlap the suffix that it matches.
        tie: which policy.
    """
    place = first
    reach = reach_of(tokens, length, draft, end, place)
    if tie == LONGEST:
        if second != first:
            other = reach_of(tokens, length, draft, end, second)
            if other >= reach:
                place, reach = second, other
        # No copy is that far back, or it lies within the suffix that it would have to match.
        if 0 < copy_distance < end and not (disjoint and copy_distance < size):
            running = end - copy_distance
            other = reach_of(tokens, length, draft, end, running)
            if other > reach or (other == reach and running > place):
                place, reach = running, other
    return place, reach


@kernel
def look_through(
    tokens: int, first_end: int, last: int, n: int, end: int, tie: int, first: int, second: int
) -> tuple[int, int]:
    """Adds to what an index found what the tokens say that it does not hold yet.

    Args:
        tokens: address of the text.
        first_end: first end of an n-gram that is not in the index.
        last: last end that counts.
        n: size of the n-gram.
        end: where the n-gram itself ends.
        tie: which policy.
        first: an end of it that the index holds; 0: none.
        second: the latest such end.

    Returns:
        (end, latest end), see `match_text`.
    """
    token = load_u32(tokens + 4 * (end - 1))
    for other in range(max(n, first_end), last + 1):
        if load_u32(tokens + 4 * (other - 1)) == token and equal_tokens(
            tokens + 4 * (other - n), tokens + 4 * (end - n), n
        ):
            if first == 0 or tie == LATEST:
                first = other
            second = other
            if tie == EARLIEST:
                break
    return first, second


@kernel
def match_text(
    header: int,
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
    longest: int,
) -> tuple[int, int, int]:
    """Finds the longest n-gram at the end of a text that occurred before.

    Args:
        header: address of the text; what its index lacks is looked through.
        mixed: the mixed hashes of its last n tokens, at [n].
        chunks: the addresses of the chunks that they belong to, at [n].
        longest: largest n.

    Returns:
        (n, end, latest end); n = 0: none.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    tie = load_i64(header + 8 * TIE)
    slot_words = 2 if tie == LONGEST else 1
    for n in range(longest, min_ngram - 1, -1):
        table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
        slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
        pattern = tokens + 4 * (length - n)
        first, second = find_in_chunk(
            chunks[n], slot_bits, slot_words, tokens, mixed[n], pattern, n
        )
        next_end = load_i64(table + 8 * NEXT_END)
        last = last_end(header, n)
        if next_end <= last and (first == 0 or tie != EARLIEST):
            first, second = look_through(tokens, next_end, last, n, length, tie, first, second)
        if first != 0:
            return n, first, second
    return 0, 0, 0


@kernel
def scan_text(header: int, buffer: npt.NDArray[np.uint32], end: int) -> tuple[int, int, int]:
    """Finds by a scan what `match_text` and `match_draft` find in the index."""
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    first, size = find_match(buffer, end, min_ngram, max_ngram, disjoint, tie == LATEST)
    second = first
    if tie == LONGEST and first != 0:
        second, size = find_match(buffer, end, min_ngram, max_ngram, disjoint, True)
    return size, first, second


@kernel
def match_draft(
    header: int, base: np.uint64, draft: int, end: int, pattern: npt.NDArray[np.uint32]
) -> tuple[int, int, int]:
    """Finds the longest n-gram at the end of text + draft that occurred before in the two.

    What the index does not hold is a few tokens, and is looked through.

    Args:
        header: address of the text.
        base: of the polynomial.
        draft: address of the draft.
        end: of text + draft.
        pattern: scratch, [32].

    Returns:
        (n, end, latest end); n = 0: none.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    slot_words = 2 if tie == LONGEST else 1
    longest = min(load_i64(header + 8 * MAX_NGRAM), end // 2 if disjoint else end - 1)
    for n in range(longest, min_ngram - 1, -1):
        hash_ = np.uint64(0)
        for i in range(n):
            pattern[i] = token_at(tokens, length, draft, end - n + i)
            hash_ = hash_ * base + np.uint64(pattern[i])
        table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
        first, second = find(table, slot_words, tokens, mix(hash_), pattern.ctypes.data, n)
        if first == 0 or tie != EARLIEST:
            lag = n if disjoint else 1
            for other in range(max(n, load_i64(table + 8 * NEXT_END)), end - lag + 1):
                is_equal = True
                for i in range(n):
                    if token_at(tokens, length, draft, other - n + i) != pattern[i]:
                        is_equal = False
                        break
                if is_equal:
                    if first == 0 or tie == LATEST:
                        first = other
                    second = other
                    if tie == EARLIEST:
                        break
        if first != 0:
            return n, first, second
    return 0, 0, 0
