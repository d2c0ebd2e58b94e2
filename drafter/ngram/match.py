"""Where a draft may be copied from: matches in the index, and which of several wins.

Owns how far a match reaches, and which candidate is taken; the words of the law are in
`draft_kernel.py`. Which n-grams the index holds is known to `ngram_index.py`; what a text without
one is searched by, to `kmp.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64, load_u32
from drafter.ngram.index import lag_of
from drafter.ngram.table import (
    DISJOINT,
    EARLIEST,
    INDEXED_LENGTH,
    LATEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    find,
    mix,
)

MAX_REACH_TOKENS = 64
"""How far back a match is followed to say how good it is."""

_MAX_SIZES = 32


@kernel
def token_at(tokens: int, length: int, draft: int, position: int) -> np.uint32:
    """Returns a token of text + draft."""
    if position < length:
        return load_u32(tokens + 4 * position)
    return load_u32(draft + 4 * (position - length))


@kernel
def reach_of(tokens: int, length: int, draft: int, end: int, place: int, most: int) -> int:
    """Returns how many tokens before `place` agree with those before `end`, up to `most`."""
    most = min(place, most)
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
    reach = reach_of(tokens, length, draft, end, place, MAX_REACH_TOKENS)
    if tie == LONGEST:
        if second != first:
            other = reach_of(tokens, length, draft, end, second, MAX_REACH_TOKENS)
            if other >= reach:
                place, reach = second, other
        # No copy is that far back, or it lies within the suffix that it would have to match.
        if 0 < copy_distance < end and not (disjoint and copy_distance < size):
            running = end - copy_distance
            other = reach_of(tokens, length, draft, end, running, MAX_REACH_TOKENS)
            if other > reach or (other == reach and running > place):
                place, reach = running, other
    return place, reach


@kernel
def look_through(
    alike: npt.NDArray[np.int64],
    num_alike: int,
    n: int,
    first_end: int,
    last: int,
    tie: int,
    first: int,
    second: int,
) -> tuple[int, int]:
    """Adds to what an index says of the last n-gram what the tokens say that it does not know yet.

    Args:
        alike: the ends that agree with that of the text at all, and how far, [2, >= num_alike].
        num_alike: how many, in ascending order.
        n: size of the n-gram.
        first_end: first end that the index does not know.
        last: last end that counts.
        tie: which policy.
        first: an end of it that the index knows; 0: none.
        second: the latest such end.

    Returns:
        (end, latest end).
    """
    for i in range(num_alike):
        other = alike[0, i]
        if alike[1, i] >= n and first_end <= other <= last:
            if first == 0 or tie == LATEST:
                first = other
            second = other
            if tie == EARLIEST:
                break
    return first, second


@kernel
def match(
    header: int,
    base: np.uint64,
    draft: int,
    end: int,
    pattern: npt.NDArray[np.uint32],
    alike: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Finds the longest n-gram at the end of text + draft that occurred before in the two.

    Args:
        header: address of the text; what its index does not know is looked through.
        base: of the polynomial.
        draft: address of the draft.
        end: of text and as much of the draft as there is.
        pattern: scratch, [32].
        alike: scratch, [2, as many as there are tokens that the index does not know, and 32 more].

    Returns:
        (n, end, latest end); n = 0: none.
    """
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    longest = min(load_i64(header + 8 * MAX_NGRAM), end // 2 if disjoint else end - 1)
    size, first, second = descend(header, base, draft, end, longest, pattern, alike, False)
    if size < 0:
        return descend(header, base, draft, end, longest, pattern, alike, True)
    return size, first, second


@kernel
def descend(
    header: int,
    base: np.uint64,
    draft: int,
    end: int,
    longest: int,
    pattern: npt.NDArray[np.uint32],
    alike: npt.NDArray[np.int64],
    confirms: bool,
) -> tuple[int, int, int]:
    """Follows the n-grams at the end of text + draft from the smallest size on, see `match`.

    As `ngram_index.py` says: a size that has no match ends the search.

    Args:
        header, base, draft, end, pattern, alike: see there.
        longest: the largest size.
        confirms: whether the n-grams of all sizes are compared with what the index says, each
            somewhere else in the text; else only the largest: what agrees with that agrees with
            those that led there.

    Returns:
        As `match` does; n = -1: hash bits were alike by chance, and all must be compared.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    indexed = load_i64(header + 8 * INDEXED_LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    slot_words = 2 if tie == LONGEST else 1
    last_token = token_at(tokens, length, draft, end - 1)
    num_alike = 0
    for other in range(max(1, indexed + 1 - lag_of(longest, disjoint)), end):
        if token_at(tokens, length, draft, other - 1) == last_token:
            alike[0, num_alike] = other
            alike[1, num_alike] = reach_of(tokens, length, draft, end, other, longest)
            num_alike += 1

    size, first, second = 0, 0, 0
    hash_, power = np.uint64(0), base
    # Whether the table of the next size knows all that match; if not, the one that may.
    looks_up, alone = True, 0
    known, known_size = 0, 0
    for n in range(1, longest + 1):
        token = token_at(tokens, length, draft, end - n)
        pattern[_MAX_SIZES - n] = token
        hash_ += np.uint64(token) * power
        power *= base
        if n < min_ngram:
            continue
        lag = lag_of(n, disjoint)
        earliest, latest = 0, 0
        if looks_up:
            table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
            suffix = pattern.ctypes.data + 4 * (_MAX_SIZES - n) if confirms else 0
            earliest, latest, looks_up = find(table, slot_words, mix(hash_), tokens, suffix, n)
            alone = earliest
        elif alone != 0:
            if n > alone or alone > end - lag or load_u32(tokens + 4 * (alone - n)) != token:
                alone = 0
            earliest, latest = alone, alone
        if earliest != 0:
            known, known_size = earliest, n
        if num_alike > 0 and (earliest == 0 or tie != EARLIEST):
            earliest, latest = look_through(
                alike, num_alike, n, indexed + 1 - lag, end - lag, tie, earliest, latest
            )
        if earliest == 0:
            break
        size, first, second = n, earliest, latest
    if not confirms and reach_of(tokens, length, draft, end, known, known_size) < known_size:
        return -1, 0, 0
    return size, first, second
