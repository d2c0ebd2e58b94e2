"""One pool's texts, as tokens: appended at the tail, evicted from the head.

Owns which part of a pool's chain of tokens is filled. Does not know why a text comes or goes
(`drafter.pools`), where tokens lie (`tokens.py`) nor which n-grams are indexed (`index.py`). It
works token by token, so it can stop after any.
"""

import numpy as np
import numpy.typing as npt

from drafter.pool_index.arena import (
    BLOCK_BITS,
    HEAD,
    HEAD_INDEX,
    MAX_POOL_BLOCKS,
    POOL_TOKENS,
    TAIL,
    Arena,
    allocate_block,
    free_block,
    word,
)
from drafter.pool_index.index import move_cursors, unindex_head
from drafter.pool_index.table import free_table, make_table
from drafter.pool_index.tokens import (
    FIRST,
    OFFSET,
    chain_block,
    free_token_block,
    position_after,
    set_begins,
)
from servicekit.kernels.jit import kernel

NEW_POOL_BLOCKS = 4
"""A new pool's header, the directory and first page of its table, and a token block."""


@kernel
def make_pool(arena: Arena, max_blocks: int) -> int:
    """Returns the header of a new pool of at most so many blocks; needs `NEW_POOL_BLOCKS`."""
    pool = allocate_block(arena, 0)
    header = pool << BLOCK_BITS
    arena[header + MAX_POOL_BLOCKS] = max_blocks
    make_table(arena, pool)
    start = (allocate_block(arena, pool) << BLOCK_BITS) + FIRST
    arena[header + HEAD] = start
    arena[header + TAIL] = start
    return pool


@kernel
def free_pool(arena: Arena, pool: int) -> None:
    """Frees the blocks of an emptied pool."""
    head = word(arena, (pool << BLOCK_BITS) + HEAD)
    free_token_block(arena, pool, (head - 1) >> BLOCK_BITS)
    free_table(arena, pool)
    free_block(arena, pool, pool)


@kernel
def append_tokens(arena: Arena, pool: int, token_ids: npt.NDArray[np.uint32], begins: bool) -> int:
    """Appends tokens of one text as long as there is room; returns how many.

    Args:
        arena, pool: the pool.
        token_ids: [n] uint32.
        begins: whether they begin the text.
    """
    header = pool << BLOCK_BITS
    for i in range(len(token_ids)):
        tail = word(arena, header + TAIL)
        if tail & OFFSET == 0:
            last = (tail - 1) >> BLOCK_BITS
            start = chain_block(arena, pool, last)
            if start == 0:
                return i
            move_cursors(arena, pool, tail, start)
            if arena[header + HEAD] == tail:
                arena[header + HEAD] = start
                free_token_block(arena, pool, last)
            arena[header + TAIL] = start
            tail = start
        if begins and i == 0:
            set_begins(arena, tail)
        arena[tail] = token_ids[i]
        arena[header + TAIL] = tail + 1
        arena[header + POOL_TOKENS] += 1
    return len(token_ids)


@kernel
def evict(arena: Arena, pool: int, num_text_tokens: int, max_tokens: int) -> int:
    """Evicts up to so many tokens, and the n-grams that begin at them; returns how many.

    They are those of the oldest text, of which `num_text_tokens` are in the pool.
    """
    header = pool << BLOCK_BITS
    count = min(max_tokens, num_text_tokens)
    for i in range(count):
        head = word(arena, header + HEAD)
        unindex_head(arena, pool, num_text_tokens - i)
        after_head = position_after(arena, head)
        arena[header + HEAD] = after_head
        arena[header + HEAD_INDEX] += 1
        arena[header + POOL_TOKENS] -= 1
        if after_head & OFFSET == FIRST:
            free_token_block(arena, pool, head >> BLOCK_BITS)
        if i + 1 < num_text_tokens:
            set_begins(arena, after_head)
    return count
