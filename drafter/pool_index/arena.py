"""The memory of all pools: one array of 4 KiB blocks.

Owns allocating and freeing blocks, and the bounds on the arena and on each pool. Does not know what
blocks hold (`table.py`, `tokens.py`). Since there is one array, a kernel that answers a whole batch
needs only it and a block number per sequence. The operating system commits memory when it is
written, so unused blocks cost nothing.

    arena     [capacity * BLOCK_WORDS] uint32
    block     arena[b * BLOCK_WORDS : (b + 1) * BLOCK_WORDS]; block 0 is the arena's own
    position  index into `arena` of a token; 0 is none
    pool      block number of a pool's header
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

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
"""Bound on `USED`: at most what the arena can hold."""
KEY_MASK = 4
"""Bits of an n-gram's hash that are stored: all, except in tests of collisions."""
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
"""How many tokens were evicted so far, modulo 2^32: gives positions an order."""
CURSORS = 8
"""32 positions, see `index.py`."""
CURSOR_INDICES = 40
"""The cursors' places in the order of `HEAD_INDEX`."""
DIRECTORY_BLOCKS = 72
"""Block numbers of the directory's parts, see `table.py`."""
DIRECTORY_PARTS = 512


def make_arena(num_bytes: int, *, seed: int, key_bits: int = 27) -> Arena:
    """Returns an arena without pools.

    Args:
        num_bytes: its size.
        seed: 64 secret bits, so that nobody can choose tokens whose n-grams collide.
        key_bits: how many bits of an n-gram's hash are stored, <= 27; for tests.
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
    """Reads a word as int64, so that arithmetic with it cannot wrap."""
    value: int = arena[at]
    return int(np.int64(value))


@kernel
def has_room(arena: Arena, pool: int, num_blocks: int) -> bool:
    """Whether so many blocks can be allocated for a pool; pool 0: a new one."""
    if arena[USED] + num_blocks > arena[MAX_BLOCKS]:
        return False
    header = pool << BLOCK_BITS
    return pool == 0 or arena[header + POOL_BLOCKS] + num_blocks <= arena[header + MAX_POOL_BLOCKS]


@kernel
def allocate_block(arena: Arena, pool: int) -> int:
    """Allocates a block of zeros for a pool; returns 0 if there is no room.

    Pool 0: the block becomes the header of a new pool, and the first that it owns.
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
