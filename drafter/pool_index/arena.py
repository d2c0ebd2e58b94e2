"""The memory of all pools: one array of 4 KiB blocks, and who holds how many.

Owns taking and giving back blocks, and the bounds on both the arena and each pool. Does not know
what blocks hold (`pool_table.py`, `pool_tokens.py`). One array for everything, so that a kernel
that answers a whole batch needs no more than it and one block number per sequence. Untouched memory
costs nothing: the operating system commits it as it is written.

    arena     [capacity * BLOCK_WORDS] uint32
    block     arena[b * BLOCK_WORDS : (b + 1) * BLOCK_WORDS]; block 0 is the arena's own
    position  index into `arena` of a token; 0 is none
    pool      block number of a pool's header
"""

import numpy as np
import numpy.typing as npt

from drafter.kernels.jit import kernel

Arena = npt.NDArray[np.uint32]

BLOCK_BITS = 10
BLOCK_WORDS = 1 << BLOCK_BITS
BLOCK_BYTES = 4 * BLOCK_WORDS
MAX_ARENA_BYTES = 1 << 34
"""Positions are 32 bits wide."""

# Words of block 0.
NEXT_FRESH = 0
FREE = 1
USED = 2
MAX_BLOCKS = 3
"""No more blocks than this are taken, whatever the arena could hold."""
KEY_MASK = 4
"""Bits that are kept of an n-gram's hash: all, but for tests of what collides."""
SEED_LOW = 5
SEED_HIGH = 6

# Words of a pool's header.
POOL_BLOCKS = 0
MAX_POOL_BLOCKS = 1
DEPTH = 2
NGRAM_MASK = 3
"""Bit n - 1: n-grams of n tokens are indexed."""
HEAD = 4
"""Position of the oldest token."""
TAIL = 5
"""One past the position of the newest token."""
POOL_TOKENS = 6
HEAD_INDEX = 7
"""How many tokens were ever evicted, modulo 2^32: gives positions an order."""
CURSORS = 8
"""32 positions: n-grams of n tokens are indexed up to before it."""
CURSOR_INDICES = 40
"""32 counts: the cursors' places in the order of `HEAD_INDEX`."""
HEAD_OVERLAP = 72
"""How many tokens from the oldest on are there only to be matched, see `pool_tokens.py`."""
DIRECTORY_BLOCKS = 73
"""Block numbers of the directory's parts, see `pool_table.py`."""
DIRECTORY_PARTS = 512


def make_arena(num_bytes: int, *, seed: int, key_bits: int = 27) -> Arena:
    """Returns an arena with no block taken.

    Args:
        num_bytes: most that it may come to occupy.
        seed: 64 secret bits, so that nobody can choose tokens whose n-grams collide.
        key_bits: how many bits of an n-gram's hash are kept, <= 27; for tests.
    """
    capacity = num_bytes // BLOCK_BYTES
    arena = np.zeros(capacity * BLOCK_WORDS, dtype=np.uint32)
    arena[NEXT_FRESH] = 1
    arena[USED] = 1
    arena[MAX_BLOCKS] = capacity
    arena[KEY_MASK] = ((1 << key_bits) - 1) << (32 - key_bits) | 31
    arena[SEED_LOW] = seed & 0xFFFFFFFF
    arena[SEED_HIGH] = seed >> 32
    return arena


@kernel
def word(arena: Arena, at: int) -> int:
    """Reads a word as a number of 64 bits, so that reckoning with it cannot wrap."""
    value: int = arena[at]
    return int(np.int64(value))


@kernel
def has_room(arena: Arena, pool: int, num_blocks: int) -> bool:
    """Whether a pool may take this many blocks; pool 0: one that is yet to be made."""
    if arena[USED] + num_blocks > arena[MAX_BLOCKS]:
        return False
    header = pool << BLOCK_BITS
    return pool == 0 or arena[header + POOL_BLOCKS] + num_blocks <= arena[header + MAX_POOL_BLOCKS]


@kernel
def allocate_block(arena: Arena, pool: int) -> int:
    """Returns a block of zeros that is the pool's from now on; 0 if there is no room.

    Pool 0: the block becomes a pool's header, and counts as its own first.
    """
    if not has_room(arena, pool, 1):
        return 0
    block = word(arena, FREE)
    if block != 0:
        start = block << BLOCK_BITS
        arena[FREE] = arena[start]
        for i in range(start, start + BLOCK_WORDS):
            arena[i] = 0
    else:
        block = word(arena, NEXT_FRESH)
        arena[NEXT_FRESH] = block + 1
    arena[USED] += 1
    owner = block if pool == 0 else pool
    arena[(owner << BLOCK_BITS) + POOL_BLOCKS] += 1
    return block


@kernel
def free_block(arena: Arena, pool: int, block: int) -> None:
    """Frees a block of the pool."""
    arena[(pool << BLOCK_BITS) + POOL_BLOCKS] -= 1
    arena[block << BLOCK_BITS] = arena[FREE]
    arena[FREE] = block
    arena[USED] -= 1
