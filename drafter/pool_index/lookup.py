"""What a context may be continued with from one pool: look-up and copy. Kernels only.

Where tokens lie is known to `pool_tokens.py`, what is in the table to `pool_index.py`.
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
def _reach(
    arena: Arena, position: int, buffer: npt.NDArray[np.uint32], num_tokens: int, most: int
) -> int:
    """How many tokens before the position agree with the end of the context, within its text."""
    most = min(most, num_tokens)
    reach = 0
    while reach < most and not begins_at(arena, position):
        position = position_before(arena, position)
        if arena[position] != buffer[num_tokens - 1 - reach]:
            break
        reach += 1
    return reach


@kernel
def find_in_pool(
    arena: Arena,
    pool: int,
    buffer: npt.NDArray[np.uint32],
    num_tokens: int,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_reach: int,
    own: int,
) -> tuple[int, int]:
    """Finds the place in a pool's text that a context may be continued from.

    An n-gram that is not there has no longer one, so the sizes are tried from the shortest on: a
    context that the pool knows nothing of costs one look-up.

    Args:
        arena: all pools.
        pool: the one that is looked into; its index must cover the sizes.
        buffer: the context is its first `num_tokens` tokens, [capacity] uint32.
        num_tokens: of the context.
        min_ngram: shortest n-gram that counts.
        max_ngram: longest that is looked up; the longest that is found wins.
        tie: EARLIEST or LATEST occurrence, or LONGEST: whichever of the two reaches further back,
            the latest if both do.
        max_reach: how far back the match is followed, >= max_ngram.
        own: the owner whose tokens do not count as occurrences; 0: none. Where the earliest one
            does not count, the latest of those that do takes its place.

    Returns:
        (position, reach): of the draft's first token, and how many tokens before it agree with the
        end of the context. (0, 0): nothing.
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
            if _reach(arena, word(arena, at + 2), buffer, num_tokens, n) == n:
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
    reach = _reach(arena, position, buffer, num_tokens, max_reach)
    if tie == LONGEST and earliest != latest:
        reach_of_earliest = _reach(arena, earliest, buffer, num_tokens, max_reach)
        if reach_of_earliest > reach:
            return earliest, reach_of_earliest
    return position, reach


@kernel
def copy_from_pool(
    arena: Arena, pool: int, position: int, out: npt.NDArray[np.uint32], most: int
) -> int:
    """Copies the tokens from a position on to `out`, at most to the end of their text, and of those
    that continue it.

    Returns:
        How many.
    """
    tail = word(arena, (pool << BLOCK_BITS) + TAIL)
    count = 0
    while count < most:
        out[count] = arena[position]
        count += 1
        following = position_after(arena, position)
        if following == tail or begins_at(arena, following):
            following = side_word(arena, position, JOINTS)
            if following == 0:
                break
        position = following
    return count
