"""Where a draft may be copied from: finds matches through the index, and chooses one of several.

Owns the length of a match and the choice between candidates; `draft.py` states the rules. Which
n-grams the index holds is known to `index.py`; how a text without one is searched, to `kmp.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.ngram.index import lag_of
from drafter.ngram.table import (
    DISJOINT,
    EARLIEST,
    INDEXED_LENGTH,
    LATEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MAX_NGRAM_TOKENS,
    MIN_NGRAM,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    find,
    mix,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import address_of, load_i64, load_u32

MAX_MATCH_LENGTH = 64
"""How far back a match is followed; a longer one counts as this long."""


@kernel
def token_at(tokens: int, length: int, draft: int, position: int) -> np.uint32:
    """Returns a token of text + draft."""
    if position < length:
        return load_u32(tokens + 4 * position)
    return load_u32(draft + 4 * (position - length))


@kernel
def measure_match(
    tokens: int, length: int, draft: int, end: int, place: int, max_length: int
) -> int:
    """Returns how many tokens before `place` equal those before `end`, up to `max_length`."""
    max_length = min(place, max_length)
    count = 0
    while count < max_length and token_at(tokens, length, draft, place - 1 - count) == token_at(
        tokens, length, draft, end - 1 - count
    ):
        count += 1
    return count


@kernel
def choose(
    header: int, draft: int, end: int, size: int, first: int, second: int, copy_distance: int
) -> tuple[int, int]:
    """Returns (place, match length) of the candidate that wins.

    Args:
        header: address of the text.
        draft: address of the draft that follows it.
        end: length of the text and the draft so far.
        size: n of the longest match.
        first: an end of it; the earliest with `TIE_LONGEST`.
        second: the latest, with `TIE_LONGEST`.
        copy_distance: how far back the source of the running copy is; 0: there is none.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    place = first
    longest = measure_match(tokens, length, draft, end, place, MAX_MATCH_LENGTH)
    if load_i64(header + 8 * TIE) == LONGEST:
        if second != first:
            other = measure_match(tokens, length, draft, end, second, MAX_MATCH_LENGTH)
            if other >= longest:
                place, longest = second, other
        # Otherwise there is no copy, or its source lies outside the text or within the suffix.
        if 0 < copy_distance < end and not (disjoint and copy_distance < size):
            running = end - copy_distance
            other = measure_match(tokens, length, draft, end, running, MAX_MATCH_LENGTH)
            if other > longest or (other == longest and running > place):
                place, longest = running, other
    return place, longest


@kernel
def match(
    header: int,
    base: np.uint64,
    draft: int,
    end: int,
    pattern: npt.NDArray[np.uint32],
    candidates: npt.NDArray[np.int64],
) -> tuple[int, int, int]:
    """Finds the longest n-gram at the end of text + draft that occurred earlier in the two.

    Args:
        header: address of the text; its unindexed tokens are scanned.
        base: of the polynomial.
        draft: address of the draft.
        end: length of the text and the draft so far.
        pattern: scratch, [MAX_NGRAM_TOKENS].
        candidates: scratch, [2, number of tokens that are not indexed + MAX_NGRAM_TOKENS].

    Returns:
        (n, end, latest end); n = 0: there is none.
    """
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    longest = min(load_i64(header + 8 * MAX_NGRAM), end // 2 if disjoint else end - 1)
    size, first, second = match_sizes(header, base, draft, end, longest, pattern, candidates, False)
    if size < 0:
        return match_sizes(header, base, draft, end, longest, pattern, candidates, True)
    return size, first, second


@kernel
def match_sizes(
    header: int,
    base: np.uint64,
    draft: int,
    end: int,
    longest: int,
    pattern: npt.NDArray[np.uint32],
    candidates: npt.NDArray[np.int64],
    confirms: bool,
) -> tuple[int, int, int]:
    """Looks up the n-grams at the end of text + draft from the smallest size on, see `match`.

    A size without a match ends the search, as `index.py` explains.

    Args:
        header, base, draft, end, pattern, candidates: see `match`.
        longest: the largest size.
        confirms: whether the tokens of each size are compared with those that the index names; else
            only those of the largest size, which contain the others.

    Returns:
        As `match` does; n = -1: some hash bits were equal by chance; `confirms` is needed.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    indexed = load_i64(header + 8 * INDEXED_LENGTH)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    tie = load_i64(header + 8 * TIE)
    slot_words = 2 if tie == LONGEST else 1
    # Of the occurrences that are not indexed: ends, ascending, and lengths of the matches.
    last_token = token_at(tokens, length, draft, end - 1)
    num_candidates = 0
    for other in range(max(1, indexed + 1 - lag_of(longest, disjoint)), end):
        if token_at(tokens, length, draft, other - 1) == last_token:
            candidates[0, num_candidates] = other
            candidates[1, num_candidates] = measure_match(
                tokens, length, draft, end, other, longest
            )
            num_candidates += 1

    size, first, second = 0, 0, 0
    hash_, power = np.uint64(0), base
    # Whether the table of the next size holds all occurrences; if not, the only one that may match.
    looks_up, alone = True, 0
    known, known_size = 0, 0
    for n in range(1, longest + 1):
        token = token_at(tokens, length, draft, end - n)
        pattern[MAX_NGRAM_TOKENS - n] = token
        hash_ += np.uint64(token) * power
        power *= base
        if n < min_ngram:
            continue
        lag = lag_of(n, disjoint)
        earliest, latest = 0, 0
        if looks_up:
            table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
            suffix = address_of(pattern) + 4 * (MAX_NGRAM_TOKENS - n) if confirms else 0
            earliest, latest, looks_up = find(table, slot_words, mix(hash_), tokens, suffix, n)
            alone = earliest
        elif alone != 0:
            if n > alone or alone > end - lag or load_u32(tokens + 4 * (alone - n)) != token:
                alone = 0
            earliest, latest = alone, alone
        if earliest != 0:
            known, known_size = earliest, n
        if num_candidates > 0 and (earliest == 0 or tie != EARLIEST):
            for i in range(num_candidates):  # occurrences that are not indexed yet
                other = candidates[0, i]
                if candidates[1, i] >= n and indexed + 1 - lag <= other <= end - lag:
                    if earliest == 0 or tie == LATEST:
                        earliest = other
                    latest = other
                    if tie == EARLIEST:
                        break
        if earliest == 0:
            break
        size, first, second = n, earliest, latest
    if not confirms and measure_match(tokens, length, draft, end, known, known_size) < known_size:
        return -1, 0, 0
    return size, first, second
