"""The link from a text to its pool, in the text's header, where kernels see it.

Owns words 14 and 15 of the header (`drafter/ngram/table.py`):

    14  0: the sequence names no pool; else the store's generation << 24 | block of the pool
    15  8 bits: the pool is searched if the own match is shorter; 24 bits: length of the text at
        which it feeds its pool next, 0: not while it grows; then the owner's tag of the text that
        it fed while it grew, 0: none (`tokens.py`)

A pool's block changes when the pool comes or goes. With each such change the store enters a new
generation, so a link of the present generation is right, and any other is written anew before the
pool is searched (`drafter/history/pool_drafts.py`).
"""

from drafter.ngram.table import LENGTH, MAX_TEXT_TOKENS
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, store_i64

_POOL, _POOL_WORD = 14, 15
_BLOCK_BITS = 24
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1
_MIN_NGRAM_MASK = (1 << 8) - 1
_FEED_SHIFT = 8
_FEED_MASK = (1 << 24) - 1
_TAG_SHIFT = 32

NEVER = -1
"""A generation that no store enters."""
MAX_TAG = (1 << 31) - 1


@kernel
def link_to_pool(header: int, generation: int, block: int) -> None:
    """Writes the block of a text's pool, 0 if that holds nothing; `NEVER`: it is not known yet."""
    store_i64(header + 8 * _POOL, generation << _BLOCK_BITS | block)


@kernel
def set_pool_use(header: int, pool_min_ngram: int, feed_at: int, tag: int) -> None:
    """Writes when a text searches its pool and feeds it; the tag is at most `MAX_TAG`."""
    # No match is longer than 8 bits can say, and no text than 24 bits.
    low = min(pool_min_ngram, _MIN_NGRAM_MASK) | min(feed_at, MAX_TEXT_TOKENS + 1) << _FEED_SHIFT
    store_i64(header + 8 * _POOL_WORD, low | tag << _TAG_SHIFT)


@kernel
def pool_block_of(header: int) -> int:
    """Returns the block of a text's pool; 0: it holds nothing, or there is none."""
    return load_i64(header + 8 * _POOL) & _BLOCK_MASK


@kernel
def pool_min_ngram_of(header: int) -> int:
    """Returns the length of an own match that makes a search of the pool needless."""
    return load_i64(header + 8 * _POOL_WORD) & _MIN_NGRAM_MASK


@kernel
def own_tag_of(header: int) -> int:
    """Returns the owner's tag of what the text fed while it grew; 0: nothing."""
    return load_i64(header + 8 * _POOL_WORD) >> _TAG_SHIFT


@kernel
def is_feed_due(header: int) -> bool:
    """Whether a text has grown enough to feed its pool."""
    feed_at = (load_i64(header + 8 * _POOL_WORD) >> _FEED_SHIFT) & _FEED_MASK
    return feed_at != 0 and load_i64(header + 8 * LENGTH) >= feed_at


@kernel
def has_old_link(header: int, generation: int) -> bool:
    """Whether a text names a pool and its link is of another generation."""
    link = load_i64(header + 8 * _POOL)
    return link != 0 and link >> _BLOCK_BITS != generation
