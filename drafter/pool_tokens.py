"""Where the tokens of one pool's texts lie: in a chain of blocks, oldest first.

Owns the layout of a token block: the order of positions, and where texts begin. Does not know how
far the chain is filled (`pool_text.py`), nor what the links say that lie beside the tokens
(`pool_index.py`).

    token block  previous block, next block, 32 link blocks, 30 words of 32 bits (a text begins
                 here), then 960 tokens
    link block   of one n, beside a token block; made when there is a first link
"""

from drafter.jit import kernel
from drafter.pool_arena import BLOCK_BITS, BLOCK_WORDS, Arena, give_back, take_block, word

LONGEST_NGRAM = 32
"""So many link blocks lie beside each token block."""

_PREVIOUS = 0
_NEXT = 1
LINKS = 2
_BEGINS = 34
FIRST = 64
_LAST = BLOCK_WORDS - 1
OFFSET = BLOCK_WORDS - 1
"""Bits of a position that say where in its block it is."""


@kernel
def position_before(arena: Arena, position: int) -> int:
    """The position before; meaningless where a text begins, as one does at the oldest token."""
    if position & OFFSET == FIRST:
        previous = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _PREVIOUS)
        return (previous << BLOCK_BITS) + _LAST
    return position - 1


@kernel
def position_after(arena: Arena, position: int) -> int:
    """The position after; after the last token of all, the tail."""
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
    """Says that a text begins at the token."""
    offset = (position & OFFSET) - FIRST
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _BEGINS + (offset >> 5)
    arena[at] = word(arena, at) | (1 << (offset & 31))


@kernel
def chain_block(arena: Arena, pool: int, last: int) -> int:
    """Puts a new token block behind the last one; returns its first position, 0: no room."""
    block = take_block(arena, pool)
    if block == 0:
        return 0
    arena[(last << BLOCK_BITS) + _NEXT] = block
    arena[(block << BLOCK_BITS) + _PREVIOUS] = last
    return (block << BLOCK_BITS) + FIRST


@kernel
def free_token_block(arena: Arena, pool: int, block: int) -> None:
    """Gives back a token block and the link blocks beside it."""
    start = (block << BLOCK_BITS) + LINKS
    for at in range(start, start + LONGEST_NGRAM):
        if arena[at] != 0:
            give_back(arena, pool, word(arena, at))
    give_back(arena, pool, block)
