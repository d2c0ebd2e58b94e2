"""What a text has to do with its pool, where kernels can see it: in the text's header.

Owns words 14 and 15 of the header that `ngram_table.py` describes:

    14  0: the sequence names no pool; else the store's generation << 24 | the pool's block
    15  how far the own match must reach to make the pool needless (8 bits), how long the text is to
        be when it feeds its pool next (24 bits, 0: not while it grows), and the owner's tag of what
        it fed while it grew (0: there is no such thing; see `pool_tokens.py`)

A pool's block changes when the pool comes or goes, and with every such change the store enters a
new generation (`pool_store.py`). So a link of the present generation is right, and one of another
has to be made anew before the pool is looked into (`pool_drafts.py`).
"""

from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64, store_i64
from drafter.ngram.table import LENGTH, MAX_TEXT_TOKENS

_POOL, _POOL_WORD = 14, 15
_BLOCK_BITS = 24
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1
_MIN_NGRAM_MASK = (1 << 8) - 1
_FEED_SHIFT = 8
_FEED_MASK = (1 << 24) - 1
_TAG_SHIFT = 32

NEVER = -1
"""A generation that no store is ever in."""
MAX_TAG = (1 << 31) - 1


@kernel
def link_to_pool(header: int, generation: int, block: int) -> None:
    """Puts down where a text's pool is.

    Args:
        header: address of the text, of a sequence that names a pool.
        generation: of the store, 1 or more; `NEVER`: the block is not known yet.
        block: of the pool; 0: there is nothing to find.
    """
    store_i64(header + 8 * _POOL, generation << _BLOCK_BITS | block)


@kernel
def set_pool_use(header: int, pool_min_ngram: int, feed_at: int, tag: int) -> None:
    """Puts down when a text looks into its pool and feeds it.

    Args:
        header: address of the text, of a sequence that names a pool.
        pool_min_ngram: see above; no match reaches further than the largest that is told apart.
        feed_at: see above; a length that no text reaches is never due.
        tag: see above, at most `MAX_TAG`.
    """
    low = min(pool_min_ngram, _MIN_NGRAM_MASK) | min(feed_at, MAX_TEXT_TOKENS + 1) << _FEED_SHIFT
    store_i64(header + 8 * _POOL_WORD, low | tag << _TAG_SHIFT)


@kernel
def pool_block_of(header: int) -> int:
    """Returns the block of a text's pool; 0: there is nothing to find."""
    return load_i64(header + 8 * _POOL) & _BLOCK_MASK


@kernel
def pool_min_ngram_of(header: int) -> int:
    """Returns how far the own match must reach to make the pool needless."""
    return load_i64(header + 8 * _POOL_WORD) & _MIN_NGRAM_MASK


@kernel
def own_tag_of(header: int) -> int:
    """Returns the tag of what the text fed while it grew; 0: there is no such thing."""
    return load_i64(header + 8 * _POOL_WORD) >> _TAG_SHIFT


@kernel
def is_feed_due(header: int) -> bool:
    """Whether a text has grown so long that its pool is to be fed."""
    feed_at = (load_i64(header + 8 * _POOL_WORD) >> _FEED_SHIFT) & _FEED_MASK
    return feed_at != 0 and load_i64(header + 8 * LENGTH) >= feed_at


@kernel
def has_old_link(header: int, generation: int) -> bool:
    """Whether a text names a pool and its link is of another generation than this."""
    link = load_i64(header + 8 * _POOL)
    return link != 0 and link >> _BLOCK_BITS != generation
