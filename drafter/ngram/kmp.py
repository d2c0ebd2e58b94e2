"""Finds the longest matching n-gram by Knuth-Morris-Pratt: one backward scan of the history.

The rule. Of a context of L tokens, for n from max_ngram down to min_ngram, the pattern is the last
n tokens. An earlier occurrence [s, s + n) counts if s + n <= L - n (disjoint) or s + n < L
(allowed). The first n with one wins; its earliest or its latest occurrence is continued: the draft
is the tokens that followed it.

The scan. Read the context backwards: r[j] is the token j places before the last. The patterns of
all n are then prefixes of one pattern, r[0:max_ngram], so one Knuth-Morris-Pratt pass finds, at
every j, the longest of them that ends there, i.e. the longest occurrence that *starts* at token
L - 1 - j. An occurrence of n tokens found at j ends `distance = j - n + 1` tokens before the end of
the context: larger j is earlier, and disjoint means n <= distance.

    context  1 2 3 4 2 3    r = 3 2 4 3 2 1    pattern of n = 2: r[0:2] = 3 2
    at j = 4 the scan has matched r[3:5] = 3 2: distance 3, the draft starts at 6 - 3: 4 2 3

A scan of a long text takes milliseconds, so it can be made in pieces: its progress lies in a few
words, the *scan*, and each call examines a given number of tokens.

Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, store_i64

# Words of a scan: the place of the next token, under 0 at the end; how many tokens of the pattern
# are matched before it; the longest match so far; its distance, 0: none.
_NEXT, _MATCHED, _BEST, _DISTANCE = range(4)
SCAN_WORDS = 4
"""Int64 words that hold the progress of a scan."""


@kernel
def begin_scan(scan: int, end: int, min_ngram: int) -> None:
    """Sets `SCAN_WORDS` words to the beginning of a scan of a context of `end` tokens."""
    store_i64(scan + 8 * _NEXT, end - 2)
    store_i64(scan + 8 * _MATCHED, 0)
    store_i64(scan + 8 * _BEST, min_ngram - 1)
    store_i64(scan + 8 * _DISTANCE, 0)


@kernel
def is_scan_done(scan: int) -> bool:
    """Whether a scan has examined all that it needs."""
    return load_i64(scan + 8 * _NEXT) < 0


@kernel
def scan_result(scan: int, end: int) -> tuple[int, int]:
    """Returns (start, n) of a scan that is done; (0, 0): nothing matches.

    The draft starts at `start`, 0 < start < L, and the pattern has n tokens.
    """
    distance = load_i64(scan + 8 * _DISTANCE)
    if distance == 0:
        return 0, 0
    return end - distance, load_i64(scan + 8 * _BEST)


@kernel
def continue_scan(
    scan: int,
    tokens: int,
    length: int,
    draft: int,
    end: int,
    min_ngram: int,
    max_ngram: int,
    disjoint: bool,
    latest: bool,
    max_tokens: int,
) -> int:
    """Continues a scan under the options, and for the context, that it was begun with.

    Args:
        scan: its address.
        tokens: address of a text; the context is the text and a draft that follows it.
        length: of the text.
        draft: address of the draft.
        end: length of the text and the draft, L.
        min_ngram, max_ngram: shortest and longest pattern.
        disjoint: whether an occurrence must not overlap the suffix that it matches.
        latest: whether the latest occurrence wins; else the earliest.
        max_tokens: how many tokens to examine.

    Returns:
        How many were examined; fewer if the scan is done.
    """
    # No longer pattern leaves room for an earlier occurrence.
    longest = min(max_ngram, end // 2 if disjoint else end - 1)
    if longest < min_ngram:
        store_i64(scan + 8 * _NEXT, -1)
        return 0

    pattern = np.empty(longest, dtype=np.uint32)
    for k in range(longest):
        place = end - 1 - k
        if place < length:
            pattern[k] = load_u32(tokens + 4 * place)
        else:
            pattern[k] = load_u32(draft + 4 * (place - length))
    # border[k]: the longest proper prefix of pattern[0:k] that is also its suffix.
    border = np.zeros(longest + 1, dtype=np.int64)
    matched = 0
    for k in range(1, longest):
        while matched > 0 and pattern[k] != pattern[matched]:
            matched = border[matched]
        if pattern[k] == pattern[matched]:
            matched += 1
        border[k + 1] = matched

    first = load_i64(scan + 8 * _NEXT)
    stop = max(first - max_tokens, -1)
    num_examined = 0
    if first >= length:
        # Where the text would begin if the draft lay right behind it.
        before = draft - 4 * length
        num_examined += _scan_part(
            scan, before, max(stop, length - 1), end, pattern, border, disjoint, latest
        )
    if stop < length - 1 and not is_scan_done(scan):
        num_examined += _scan_part(scan, tokens, stop, end, pattern, border, disjoint, latest)
    return num_examined


@kernel
def _scan_part(
    scan: int,
    tokens: int,
    stop: int,
    end: int,
    pattern: npt.NDArray[np.uint32],
    border: npt.NDArray[np.int64],
    disjoint: bool,
    latest: bool,
) -> int:
    """Continues a scan until the next token is at `stop`, see `continue_scan`."""
    longest = len(pattern)
    matched = load_i64(scan + 8 * _MATCHED)
    best = load_i64(scan + 8 * _BEST)
    distance = load_i64(scan + 8 * _DISTANCE)
    first = pattern[0]
    at = begin = load_i64(scan + 8 * _NEXT)
    is_settled = False
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
            while 2 * fitting > end - 1 - at:
                fitting = border[fitting]
        if fitting > best or (fitting == best and distance > 0 and not latest):
            best = fitting
            distance = end - 1 - at - fitting
            if latest and best == longest:
                is_settled = True
                break
    store_i64(scan + 8 * _NEXT, -1 if is_settled else at)
    store_i64(scan + 8 * _MATCHED, matched)
    store_i64(scan + 8 * _BEST, best)
    store_i64(scan + 8 * _DISTANCE, distance)
    return begin - at
