"""Finds the longest match of a text's end through its index.

Owns the lookup, from the smallest n-gram size on, and the scan of the tokens that are not indexed
yet. Which n-grams the index holds is known to `index.py`; how a text without one is searched, to
`kmp.py`; which of several places is continued, to `draft.py`.
"""

import numpy as np

from drafter.ngram.table import (
    INDEXED_LENGTH,
    LENGTH,
    MAX_NGRAM,
    MAX_NGRAM_TOKENS,
    MIN_NGRAM,
    REPEATED,
    TABLE_WORDS,
    TABLES,
    TOKENS,
    earliest_of,
    find,
    latest_of,
    mix,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, store_i64

NEAR_WORDS = 2 * (MAX_NGRAM_TOKENS + 1)
"""Int64 words that a match works on."""


@kernel
def measure_match(tokens: int, length: int, place: int, max_length: int) -> int:
    """Returns how many tokens before `place` equal those at the end, up to `max_length`."""
    max_length = min(place, max_length)
    count = 0
    while count < max_length and load_u32(tokens + 4 * (place - 1 - count)) == load_u32(
        tokens + 4 * (length - 1 - count)
    ):
        count += 1
    return count


@kernel
def match(header: int, base: np.uint64, near: int) -> tuple[int, int, int]:
    """Finds the longest n-gram at the end of a text that occurred before, sharing no token with it.

    A size without a match ends the search, as `index.py` explains.

    Args:
        header: address of the text, which has an index; its unindexed tokens are scanned.
        base: of the polynomial.
        near: address of `NEAR_WORDS` words, scratch.

    Returns:
        (n, earliest end, latest end); n = 0: there is none.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    longest = min(load_i64(header + 8 * MAX_NGRAM), length // 2)
    if longest < min_ngram:
        return 0, 0, 0
    scan_near(header, longest, near)
    size, earliest, latest = 0, 0, 0
    hash_, power = np.uint64(0), base
    # Whether the table of the next size holds all occurrences; if not, the only one that may match.
    looks_up, alone = True, 0
    for n in range(1, longest + 1):
        token = load_u32(tokens + 4 * (length - n))
        hash_ += np.uint64(token) * power
        power *= base
        if n < min_ngram:
            continue
        first, last = 0, 0
        if looks_up:
            table = header + 8 * (TABLES + TABLE_WORDS * (n - min_ngram))
            slot = find(table, mix(hash_), tokens, tokens + 4 * (length - n), n)
            first, last = earliest_of(slot), latest_of(slot)
            looks_up = slot & REPEATED != 0
            alone = first
        elif alone != 0:
            if n > alone or load_u32(tokens + 4 * (alone - n)) != token:
                alone = 0
            first, last = alone, alone
        if load_i64(near + 16 * n) != 0:
            last = load_i64(near + 16 * n + 8)
            if first == 0:
                first = load_i64(near + 16 * n)
        if first == 0:
            break
        size, earliest, latest = n, first, last
    return size, earliest, latest


@kernel
def scan_near(header: int, longest: int, near: int) -> None:
    """Finds the occurrences that are not in the tables, by size.

    Args:
        header: address of the text.
        longest: the largest size.
        near: address that receives, for each n, (earliest end, latest end); 0: there is none.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    for n in range(min_ngram, longest + 1):
        store_i64(near + 16 * n, 0)
    last_token = load_u32(tokens + 4 * (length - 1))
    first = load_i64(header + 8 * INDEXED_LENGTH) - load_i64(header + 8 * MAX_NGRAM) + 1
    for end in range(max(1, first), length - min_ngram + 1):
        if load_u32(tokens + 4 * (end - 1)) == last_token:
            fitting = measure_match(tokens, length, end, min(longest, length - end))
            for n in range(min_ngram, fitting + 1):
                if load_i64(near + 16 * n) == 0:
                    store_i64(near + 16 * n, end)
                store_i64(near + 16 * n + 8, end)
