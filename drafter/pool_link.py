"""Which pool a text may draft from, where kernels can see it: in the text's header.

Owns words 14 and 15 of the header that `ngram_table.py` describes:

    14  0: the sequence names no pool; else the store's generation << 24 | the pool's block
    15  how far the own match must reach to make the pool needless

A pool's block changes when the pool comes or goes, and with every such change the store enters a
new generation (`pool_store.py`). So a link of the present generation is right, and one of another
has to be made anew before the pool is looked into (`pool_drafts.py`).
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.kernel_memory import load_i64, store_i64

_POOL, _POOL_MIN_NGRAM = 14, 15
_BLOCK_BITS = 24
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1

NEVER = -1
"""A generation that no store is ever in."""


@kernel
def link_to_pool(header: int, generation: int, block: int, pool_min_ngram: int) -> None:
    """Puts down where a text's pool is.

    Args:
        header: address of the text, of a sequence that names a pool.
        generation: of the store, 1 or more; `NEVER`: the block is not known yet.
        block: of the pool; 0: there is nothing to find.
        pool_min_ngram: see above.
    """
    store_i64(header + 8 * _POOL, generation << _BLOCK_BITS | block)
    store_i64(header + 8 * _POOL_MIN_NGRAM, pool_min_ngram)


@kernel
def pool_block_of(header: int) -> int:
    """Returns the block of a text's pool; 0: there is nothing to find."""
    return load_i64(header + 8 * _POOL) & _BLOCK_MASK


@kernel
def pool_min_ngram_of(header: int) -> int:
    """Returns how far the own match must reach to make the pool needless."""
    return load_i64(header + 8 * _POOL_MIN_NGRAM)


@kernel
def has_old_link(headers: npt.NDArray[np.int64], generation: int) -> bool:
    """Whether a text has a link of another generation than this."""
    for t in range(len(headers)):
        link = load_i64(headers[t] + 8 * _POOL)
        if link != 0 and link >> _BLOCK_BITS != generation:
            return True
    return False
