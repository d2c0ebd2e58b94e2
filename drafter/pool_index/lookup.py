"""Finds and copies from one pool the tokens that may continue a context. Kernels only.

Where tokens lie is known to `tokens.py`, which n-grams are in the table to `index.py`.
"""

import numpy as np
import numpy.typing as npt

from drafter.kernels.jit import kernel
from drafter.ngram.table import EARLIEST, LONGEST
from drafter.pool_index.arena import BLOCK_BITS, TAIL, Arena, word
from drafter.pool_index.table import (
    extend_hash,
    first_slot,
    key_of,
    next_slot,
    page_of,
    seed_of,
    slot_after,
)
from drafter.pool_index.tokens import (
    JOINTS,
    LINKS,
    OWNERS,
    begins_at,
    position_after,
    position_before,
    side_word,
)


@kernel
def _measure_match(
    arena: Arena, position: int, buffer: npt.NDArray[np.uint32], num_tokens: int, max_length: int
) -> int:
    """How many tokens before the position, in its text, equal the end of the context."""
    max_length = min(max_length, num_tokens)
    count = 0
    while count < max_length and not begins_at(arena, position):
        position = position_before(arena, position)
        if arena[position] != buffer[num_tokens - 1 - count]:
            break
        count += 1
    return count


@kernel
def find_in_pool(
    arena: Arena,
    pool: int,
    buffer: npt.NDArray[np.uint32],
    num_tokens: int,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_length: int,
    own: int,
) -> tuple[int, int]:
    """Finds the place in a pool's texts that a context may be continued from.

    If an n-gram is not there, no longer one is, so the sizes are tried from the shortest on: a
    context that does not occur in the pool costs one lookup.

    Args:
        arena: all pools.
        pool: the pool, whose index must cover the sizes.
        buffer: the context is its first `num_tokens` tokens, [capacity] uint32.
        num_tokens: of the context.
        min_ngram: shortest n-gram that counts.
        max_ngram: longest that is looked up; the longest that is found wins.
        tie: EARLIEST or LATEST occurrence, or LONGEST: the longer match of the two, the latest if
            they are equal.
        max_length: how far back the match is followed, >= max_ngram.
        own: the owner whose tokens do not count as occurrences; 0: none. If the earliest does not
            count, the latest that does takes its place.

    Returns:
        (position of the draft's first token, length of the match); (0, 0): nothing matches.
    """
    earliest, latest = 0, 0
    ngram_hash = seed_of(arena)
    for n in range(1, min(max_ngram, num_tokens) + 1):
        ngram_hash = extend_hash(ngram_hash, buffer[num_tokens - n])
        if n < min_ngram:
            continue
        key = key_of(arena, ngram_hash, n)
        page = page_of(arena, pool, key)
        at = next_slot(arena, page, first_slot(key), key)
        while arena[at + 2] != 0:
            if _measure_match(arena, word(arena, at + 2), buffer, num_tokens, n) == n:
                break
            at = next_slot(arena, page, slot_after(page, at), key)
        if arena[at + 2] == 0:
            break
        last = word(arena, at + 2)
        if own != 0 and side_word(arena, last, OWNERS) == own:
            last = side_word(arena, last, LINKS + n - 1)
            if last == 0:
                break
        earliest, latest = word(arena, at + 1), last
        if own != 0 and side_word(arena, earliest, OWNERS) == own:
            earliest = last
    if latest == 0:
        return 0, 0
    position = earliest if tie == EARLIEST else latest
    match_length = _measure_match(arena, position, buffer, num_tokens, max_length)
    if tie == LONGEST and earliest != latest:
        length_of_earliest = _measure_match(arena, earliest, buffer, num_tokens, max_length)
        if length_of_earliest > match_length:
            return earliest, length_of_earliest
    return position, match_length


@kernel
def copy_from_pool(
    arena: Arena, pool: int, position: int, out: npt.NDArray[np.uint32], max_tokens: int
) -> int:
    """Copies tokens from a position on, up to the end of the last text that continues theirs.

    Returns:
        How many.
    """
    tail = word(arena, (pool << BLOCK_BITS) + TAIL)
    count = 0
    while count < max_tokens:
        out[count] = arena[position]
        count += 1
        following = position_after(arena, position)
        if following == tail or begins_at(arena, following):
            following = side_word(arena, position, JOINTS)
            if following == 0:
                break
        position = following
    return count
