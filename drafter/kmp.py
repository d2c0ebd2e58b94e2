"""The law of a proposal by Knuth-Morris-Pratt: one backward scan of the history.

The law. Of a context of L tokens, for n from max_ngram down to min_ngram, the pattern is the last
n tokens. An earlier occurrence [s, s + n) counts if s + n <= L - n (disjoint) or s + n < L
(allowed). The first n with one wins, the earliest or the latest occurrence is taken, and the draft
is what followed it.

The scan. Read the context backwards: r[j] is the token j places before the last. The patterns of
all n are then prefixes of one pattern, r[0:max_ngram], so one Knuth-Morris-Pratt pass finds, at
every j, the longest of them that ends there, i.e. the longest occurrence that *starts* at token
L - 1 - j. An occurrence of n tokens found at j ends `distance = j - n + 1` tokens before the end of
the context: larger j is earlier, and disjoint means n <= distance.

    context  1 2 3 4 2 3    r = 3 2 4 3 2 1    pattern of n = 2: r[0:2] = 3 2
    at j = 4 the scan has matched r[3:5] = 3 2: distance 3, the draft starts at 6 - 3: 4 2 3

Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel


@kernel
def find_match(
    buffer: npt.NDArray[np.uint32],
    num_tokens: int,
    min_ngram: int,
    max_ngram: int,
    disjoint: bool,
    latest: bool,
) -> tuple[int, int]:
    """Finds the place that the law of a proposal copies from.

    Args:
        buffer: the context is its first `num_tokens` tokens, [capacity] uint32.
        num_tokens: L.
        min_ngram: shortest pattern, >= 1.
        max_ngram: longest pattern, >= min_ngram.
        disjoint: whether an occurrence must not overlap the suffix that it matches.
        latest: whether the latest occurrence wins; else the earliest.

    Returns:
        (start, n): where the draft starts, 0 < start < L, and how many tokens the pattern has;
        (0, 0): nothing matches.
    """
    last = num_tokens - 1
    # No longer pattern leaves room for an earlier occurrence.
    longest = min(max_ngram, num_tokens // 2 if disjoint else last)
    if longest < min_ngram:
        return 0, 0

    pattern = np.empty(longest, dtype=np.uint32)
    for k in range(longest):
        pattern[k] = buffer[last - k]
    # border[k]: the longest proper prefix of pattern[0:k] that is also its suffix.
    border = np.zeros(longest + 1, dtype=np.int64)
    matched = 0
    for k in range(1, longest):
        while matched > 0 and pattern[k] != pattern[matched]:
            matched = border[matched]
        if pattern[k] == pattern[matched]:
            matched += 1
        border[k + 1] = matched

    best = min_ngram - 1
    distance = 0
    matched = 0
    first = pattern[0]
    for i in range(last - 1, -1, -1):
        token = buffer[i]
        if matched == 0:
            # Where a scan spends its time: a branch of its own makes it several times faster.
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
            while 2 * fitting > num_tokens - i:
                fitting = border[fitting]
        if fitting > best or (fitting == best and distance > 0 and not latest):
            best = fitting
            distance = last - i - fitting + 1
            if latest and best == longest:
                break
    if distance == 0:
        return 0, 0

    return num_tokens - distance, best
