"""Where the tokens of one pool's texts lie: in a chain of blocks, oldest first.

Owns the layout of a token block: the order of positions, where texts begin, and what is written
beside tokens. Does not know how far the chain is filled (`pool_text.py`), nor what the links say
that lie beside the tokens (`pool_index.py`).

    token block  previous block, next block, 34 side blocks, 30 words of 32 bits (a text begins
                 here), then 958 tokens
    side block   a word beside each token of a token block, 0 until it is set; made with the first:
                 32 of links, one per n; one of owners, one of joints
    owner        the tag of the growing sequence that a token is of; 0: of none
    joint        beside the first token of a text: how many of its tokens are there only to be
                 matched, because they end the text that it continues. Beside the last token of a
                 text: the position of the token that continues it. 0: neither
"""

from drafter.kernels.jit import kernel
from drafter.pool_index.arena import (
    BLOCK_BITS,
    BLOCK_WORDS,
    Arena,
    allocate_block,
    free_block,
    word,
)

LONGEST_NGRAM = 32

LINKS = 0
"""Of n-grams of n tokens: side `LINKS + n - 1`."""
OWNERS = 32
JOINTS = 33
_NUM_SIDES = 34

_PREVIOUS = 0
_NEXT = 1
_SIDES = 2
_BEGINS = _SIDES + _NUM_SIDES
FIRST = _BEGINS + 30
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
def side_word(arena: Arena, position: int, side: int) -> int:
    """The word beside a token; 0 unless it was set."""
    block = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _SIDES + side)
    return 0 if block == 0 else word(arena, (block << BLOCK_BITS) + (position & OFFSET))


@kernel
def set_side_word(arena: Arena, pool: int, position: int, side: int, value: int) -> bool:
    """Sets the word beside a token; False: there is no room."""
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _SIDES + side
    if arena[at] == 0:
        if value == 0:
            return True
        arena[at] = allocate_block(arena, pool)
        if arena[at] == 0:
            return False
    arena[(word(arena, at) << BLOCK_BITS) + (position & OFFSET)] = value
    return True


@kernel
def chain_block(arena: Arena, pool: int, last: int) -> int:
    """Puts a new token block behind the last one; returns its first position, 0: no room."""
    block = allocate_block(arena, pool)
    if block == 0:
        return 0
    arena[(last << BLOCK_BITS) + _NEXT] = block
    arena[(block << BLOCK_BITS) + _PREVIOUS] = last
    return (block << BLOCK_BITS) + FIRST


@kernel
def free_token_block(arena: Arena, pool: int, block: int) -> None:
    """Gives back a token block and the side blocks of it."""
    start = (block << BLOCK_BITS) + _SIDES
    for at in range(start, start + _NUM_SIDES):
        if arena[at] != 0:
            free_block(arena, pool, word(arena, at))
    free_block(arena, pool, block)
