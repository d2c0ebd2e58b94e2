"""The link from a text to its pool, in the text's header, where kernels see it.

Owns words 14 and 15 of the header (`drafter/ngram/table.py`):

    14  0: the sequence names no pool; else the store's generation << 24 | block of the pool
    15  the pool is searched if the own match is shorter

A pool's block changes when the pool comes or goes. With each such change the store enters a new
generation, so a link of the present generation is right, and any other is written anew before the
pool is searched (`drafter/history/pool_drafts.py`).
"""

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, store_i64

_POOL, _POOL_MIN_NGRAM = 14, 15
_BLOCK_BITS = 24
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1

NEVER = -1
"""A generation that no store enters."""


@kernel
def link_to_pool(header: int, generation: int, block: int) -> None:
    """Writes the block of a text's pool, 0 if that holds nothing; `NEVER`: it is not known yet."""
    store_i64(header + 8 * _POOL, generation << _BLOCK_BITS | block)


@kernel
def set_pool_use(header: int, pool_min_ngram: int) -> None:
    """Writes when a text searches its pool."""
    store_i64(header + 8 * _POOL_MIN_NGRAM, pool_min_ngram)


@kernel
def pool_block_of(header: int) -> int:
    """Returns the block of a text's pool; 0: it holds nothing, or there is none."""
    return load_i64(header + 8 * _POOL) & _BLOCK_MASK


@kernel
def pool_min_ngram_of(header: int) -> int:
    """Returns the length of an own match that makes a search of the pool needless."""
    return load_i64(header + 8 * _POOL_MIN_NGRAM)


@kernel
def has_old_link(header: int, generation: int) -> bool:
    """Whether a text names a pool and its link is of another generation."""
    link = load_i64(header + 8 * _POOL)
    return link != 0 and link >> _BLOCK_BITS != generation
