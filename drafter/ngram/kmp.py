"""Finds the longest matching n-gram by Knuth-Morris-Pratt: one backward scan of the history.

The rule. Of a context of L tokens, for n from max_ngram down to min_ngram, the pattern is the last
n tokens. An earlier occurrence [s, s + n) counts if s + n <= L - n (disjoint) or s + n < L
(allowed). The first n with one wins.

The scan. Read the context backwards: r[j] is the token j places before the last. The patterns of
all n are then prefixes of one pattern, r[0:max_ngram], so one Knuth-Morris-Pratt pass finds, at
every j, the longest of them that ends there, i.e. the longest occurrence that *starts* at token
L - 1 - j. An occurrence of n tokens found at j ends `distance = j - n + 1` tokens before the end of
the context: larger j is earlier, and disjoint means n <= distance.

    context  1 2 3 4 2 3    r = 3 2 4 3 2 1    pattern of n = 2: r[0:2] = 3 2
    at j = 4 the scan has matched r[3:5] = 3 2: distance 3, the draft starts at 6 - 3: 4 2 3

A scan of a long text takes milliseconds, so it can be made in pieces: its progress lies in a few
words, and each call examines a given number of tokens.

Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
"""

import numpy as np

from drafter.ngram.table import DISJOINT, LATEST, LENGTH, MAX_NGRAM, MIN_NGRAM, TIE, TOKENS
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, store_i64

# Words of a scan: length of the text when it was begun; the place of the next token, under 0 at the
# end; how many tokens of the pattern are matched before it; the longest match so far, and the
# distances of its latest and its earliest occurrence, 0: none.
_LENGTH, _NEXT, _MATCHED, _BEST, _NEAREST, _FARTHEST = range(6)
SCAN_WORDS = 6
"""Int64 words that hold the progress of a scan; zeros before the first call."""


@kernel
def scan(header: int, progress: int, max_tokens: int) -> int:
    """Continues the scan of a text; begins it anew if the text has grown since the last call.

    Args:
        header: address of the text.
        progress: address of `SCAN_WORDS` words.
        max_tokens: how many tokens to examine, >= 1.

    Returns:
        How many were examined.
    """
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    if load_i64(progress + 8 * _LENGTH) != length:
        store_i64(progress + 8 * _LENGTH, length)
        store_i64(progress + 8 * _NEXT, length - 2)
        store_i64(progress + 8 * _MATCHED, 0)
        store_i64(progress + 8 * _BEST, min_ngram - 1)
        store_i64(progress + 8 * _NEAREST, 0)
        store_i64(progress + 8 * _FARTHEST, 0)
    # No longer pattern leaves room for an earlier occurrence.
    longest = min(load_i64(header + 8 * MAX_NGRAM), length // 2 if disjoint else length - 1)
    if longest < min_ngram:
        store_i64(progress + 8 * _NEXT, -1)
        return 0

    pattern = np.empty(longest, dtype=np.uint32)
    for k in range(longest):
        pattern[k] = load_u32(tokens + 4 * (length - 1 - k))
    # border[k]: the longest proper prefix of pattern[0:k] that is also its suffix.
    border = np.zeros(longest + 1, dtype=np.int64)
    matched = 0
    for k in range(1, longest):
        while matched > 0 and pattern[k] != pattern[matched]:
            matched = border[matched]
        if pattern[k] == pattern[matched]:
            matched += 1
        border[k + 1] = matched

    matched = load_i64(progress + 8 * _MATCHED)
    best = load_i64(progress + 8 * _BEST)
    nearest = load_i64(progress + 8 * _NEAREST)
    farthest = load_i64(progress + 8 * _FARTHEST)
    # Earlier occurrences do not matter once the latest one is as long as any.
    ends_early = load_i64(header + 8 * TIE) == LATEST
    is_settled = False
    first = pattern[0]
    at = begin = load_i64(progress + 8 * _NEXT)
    stop = max(begin - max_tokens, -1)
    while at > stop:
        if matched == 0:
            # Most of the time is spent here: one branch for eight tokens.
            place = tokens + 4 * at
            while at - 8 > stop and not (
                (load_u32(place) == first)
                | (load_u32(place - 4) == first)
                | (load_u32(place - 8) == first)
                | (load_u32(place - 12) == first)
                | (load_u32(place - 16) == first)
                | (load_u32(place - 20) == first)
                | (load_u32(place - 24) == first)
                | (load_u32(place - 28) == first)
            ):
                at -= 8
                place -= 32
        token = load_u32(tokens + 4 * at)
        at -= 1
        if matched == 0:
            if token != first:
                continue
            matched = 1
        else:
            if matched == longest:
                matched = border[matched]
            while matched > 0 and token != pattern[matched]:
                matched = border[matched]
            if token == pattern[matched]:
                matched += 1
        fitting = matched
        if disjoint:
            # Near the end of the context a shorter pattern may fit where the longest does not.
            while 2 * fitting > length - 1 - at:
                fitting = border[fitting]
        if fitting >= best and fitting >= min_ngram:
            farthest = length - 1 - at - fitting
            if fitting > best:
                best, nearest = fitting, farthest
                if ends_early and best == longest:
                    is_settled = True
                    break
    store_i64(progress + 8 * _NEXT, -1 if is_settled else at)
    store_i64(progress + 8 * _MATCHED, matched)
    store_i64(progress + 8 * _BEST, best)
    store_i64(progress + 8 * _NEAREST, nearest)
    store_i64(progress + 8 * _FARTHEST, farthest)
    return begin - at


@kernel
def is_scanned(progress: int) -> bool:
    """Whether a scan has examined all that it needs."""
    return load_i64(progress + 8 * _NEXT) < 0


@kernel
def scan_result(progress: int) -> tuple[int, int, int]:
    """Returns (n, earliest end, latest end) of a scan that is done; n = 0: nothing matches."""
    nearest = load_i64(progress + 8 * _NEAREST)
    if nearest == 0:
        return 0, 0, 0
    length = load_i64(progress + 8 * _LENGTH)
    return (
        load_i64(progress + 8 * _BEST),
        length - load_i64(progress + 8 * _FARTHEST),
        length - nearest,
    )
