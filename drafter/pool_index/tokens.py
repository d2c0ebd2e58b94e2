"""Where the tokens of one pool's texts lie: in a chain of blocks, oldest first.

Owns the layout of a token block: the order of positions, where texts begin, and the words beside
tokens. Does not know which part of the chain is filled (`text.py`), nor what links mean
(`index.py`).

    token block  previous block, next block, 32 side blocks, 30 words of bits (a text begins here),
                 then 960 tokens
    side block   a link for each token of a token block, 0 until it is set; one block per n-gram
                 size, allocated with its first link
"""

from drafter.pool_index.arena import (
    BLOCK_BITS,
    BLOCK_WORDS,
    Arena,
    allocate_block,
    free_block,
    word,
)
from servicekit.kernels.jit import kernel

_NUM_SIDES = 32

_PREVIOUS = 0
_NEXT = 1
_SIDES = 2
_BEGINS = _SIDES + _NUM_SIDES
FIRST = _BEGINS + 30
_LAST = BLOCK_WORDS - 1
OFFSET = BLOCK_WORDS - 1
"""Bits of a position that give its place in its block."""


@kernel
def position_before(arena: Arena, position: int) -> int:
    """Returns the position before; meaningless where a text begins."""
    if position & OFFSET == FIRST:
        previous = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _PREVIOUS)
        return (previous << BLOCK_BITS) + _LAST
    return position - 1


@kernel
def position_after(arena: Arena, position: int) -> int:
    """Returns the position after; after the last token, the tail."""
    if position & OFFSET == _LAST:
        following = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _NEXT)
        if following != 0:
            return (following << BLOCK_BITS) + FIRST
    return position + 1


@kernel
def begins_at(arena: Arena, position: int) -> bool:
    """Whether a text begins at the token."""
    offset = (position & OFFSET) - FIRST
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _BEGINS + (offset >> 5)
    return (word(arena, at) >> (offset & 31)) & 1 != 0


@kernel
def set_begins(arena: Arena, position: int) -> None:
    """Marks that a text begins at the token."""
    offset = (position & OFFSET) - FIRST
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _BEGINS + (offset >> 5)
    arena[at] = word(arena, at) | (1 << (offset & 31))


@kernel
def link_of(arena: Arena, position: int, n: int) -> int:
    """Returns the link of n at a position; 0 unless it was set."""
    block = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _SIDES + n - 1)
    return 0 if block == 0 else word(arena, (block << BLOCK_BITS) + (position & OFFSET))


@kernel
def set_link(arena: Arena, pool: int, position: int, n: int, link: int) -> bool:
    """Sets the link of n at a position; False: there is no room."""
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _SIDES + n - 1
    if arena[at] == 0:
        arena[at] = allocate_block(arena, pool)
        if arena[at] == 0:
            return False
    arena[(word(arena, at) << BLOCK_BITS) + (position & OFFSET)] = link
    return True


@kernel
def chain_block(arena: Arena, pool: int, last: int) -> int:
    """Appends a token block to the chain; returns its first position, 0: no room."""
    block = allocate_block(arena, pool)
    if block == 0:
        return 0
    arena[(last << BLOCK_BITS) + _NEXT] = block
    arena[(block << BLOCK_BITS) + _PREVIOUS] = last
    return (block << BLOCK_BITS) + FIRST


@kernel
def free_token_block(arena: Arena, pool: int, block: int) -> None:
    """Frees a token block and its side blocks."""
    start = (block << BLOCK_BITS) + _SIDES
    for at in range(start, start + _NUM_SIDES):
        if arena[at] != 0:
            free_block(arena, pool, word(arena, at))
    free_block(arena, pool, block)
