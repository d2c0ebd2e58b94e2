"""The tokens of one pool's texts, and the index over them: append, index, evict.

Owns where tokens lie, where texts begin, and which n-grams are in the table (`pool_table.py`). Does
not know why a text comes or goes (`pool_store.py`), nor what is looked for (`pool_lookup.py`).
Texts are appended at the tail and evicted from the head, token by token, so the work can stop after
any of them.

    token block  previous block, next block, 32 link blocks, 30 words of 32 bits (a text begins
                 here), then 960 tokens
    link block   of one n, beside a token block: at the offset of a position, the position of the
                 next occurrence of the n-gram that ends before it; made when there is a first one
    n-gram       of n tokens, named by the position of the token that follows it in the same text

Occurrences of an n-gram are linked from the earliest to the latest, and the oldest token goes
first: so when an occurrence is evicted it is the earliest one, and its link is the next. What the
table says of the tokens that remain stays exact.

n-grams are indexed behind the tail, each n up to its cursor: `index` catches up in small pieces.
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.pool_arena import (
    BLOCK_BITS,
    BLOCK_WORDS,
    CURSOR_INDICES,
    CURSORS,
    HEAD,
    HEAD_INDEX,
    NGRAM_MASK,
    NUM_TOKENS,
    POOL_MOST,
    TAIL,
    Arena,
    give_back,
    has_room,
    take_block,
    word,
)
from drafter.pool_table import (
    empty_slot,
    fill_slot,
    first_slot,
    free_table,
    hash_further,
    key_of,
    make_table,
    may_fill,
    next_slot,
    page_of,
    seed_of,
    slot_after,
    split_page,
)

_MAX_NGRAM = 32

_PREVIOUS = 0
_NEXT = 1
_LINKS = 2
_BEGINS = 34
FIRST = 64
_LAST = BLOCK_WORDS - 1
_OFFSET = BLOCK_WORDS - 1
_MODULUS = 0xFFFFFFFF

NEW_POOL_BLOCKS = 4


@kernel
def position_before(arena: Arena, position: int) -> int:
    """The position before; meaningless where a text begins."""
    if position & _OFFSET == FIRST:
        previous = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _PREVIOUS)
        return (previous << BLOCK_BITS) + _LAST
    return position - 1


@kernel
def position_after(arena: Arena, position: int) -> int:
    """The position after; after the last token of all, the tail."""
    if position & _OFFSET == _LAST:
        following = word(arena, ((position >> BLOCK_BITS) << BLOCK_BITS) + _NEXT)
        if following != 0:
            return (following << BLOCK_BITS) + FIRST
    return position + 1


@kernel
def begins_at(arena: Arena, position: int) -> bool:
    """Whether a text begins at the token."""
    offset = (position & _OFFSET) - FIRST
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _BEGINS + (offset >> 5)
    return (word(arena, at) >> (offset & 31)) & 1 != 0


@kernel
def _set_begins(arena: Arena, position: int) -> None:
    offset = (position & _OFFSET) - FIRST
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _BEGINS + (offset >> 5)
    arena[at] = word(arena, at) | (1 << (offset & 31))


@kernel
def _key_before(arena: Arena, position: int, n: int) -> int:
    """The key of the n tokens before the position; -1 if its text has fewer before it."""
    ngram_hash = seed_of(arena)
    for _ in range(n):
        if begins_at(arena, position):
            return -1
        position = position_before(arena, position)
        ngram_hash = hash_further(ngram_hash, word(arena, position))
    return key_of(arena, ngram_hash, n)


@kernel
def _same_before(arena: Arena, one: int, other: int, n: int) -> bool:
    """Whether the n tokens before two positions, which have as many, agree."""
    for _ in range(n):
        one = position_before(arena, one)
        other = position_before(arena, other)
        if arena[one] != arena[other]:
            return False
    return True


@kernel
def make_pool(arena: Arena, most_blocks: int) -> int:
    """Returns the header of a new, empty pool; 0 if there is no room."""
    if not has_room(arena, 0, NEW_POOL_BLOCKS):
        return 0
    pool = take_block(arena, 0)
    header = pool << BLOCK_BITS
    arena[header + POOL_MOST] = max(most_blocks, NEW_POOL_BLOCKS)
    make_table(arena, pool)
    start = (take_block(arena, pool) << BLOCK_BITS) + FIRST
    arena[header + POOL_MOST] = most_blocks
    arena[header + HEAD] = start
    arena[header + TAIL] = start
    return pool


@kernel
def free_pool(arena: Arena, pool: int) -> None:
    """Gives back all that an emptied pool still holds."""
    head = word(arena, (pool << BLOCK_BITS) + HEAD)
    _free_token_block(arena, pool, (head - 1) >> BLOCK_BITS)
    free_table(arena, pool)
    give_back(arena, pool, pool)


@kernel
def index_ngrams_of(arena: Arena, pool: int, ngram_mask: int) -> None:
    """Makes the pool's index cover more sizes of n-grams; `index` then does the work."""
    header = pool << BLOCK_BITS
    for n in range(1, _MAX_NGRAM + 1):
        bit = 1 << (n - 1)
        if ngram_mask & bit and not word(arena, header + NGRAM_MASK) & bit:
            arena[header + NGRAM_MASK] = word(arena, header + NGRAM_MASK) | bit
            arena[header + CURSORS + n - 1] = arena[header + HEAD]
            arena[header + CURSOR_INDICES + n - 1] = arena[header + HEAD_INDEX]


@kernel
def append_tokens(arena: Arena, pool: int, token_ids: npt.NDArray[np.uint32], begins: bool) -> int:
    """Appends tokens of one text for as long as there is room; returns how many.

    Args:
        arena: all pools.
        pool: whose tail they go to.
        token_ids: [n] uint32.
        begins: whether a text begins with them.
    """
    header = pool << BLOCK_BITS
    for i in range(len(token_ids)):
        tail = word(arena, header + TAIL)
        if tail & _OFFSET == 0:
            block = take_block(arena, pool)
            if block == 0:
                return i
            last = (tail - 1) >> BLOCK_BITS
            start = (block << BLOCK_BITS) + FIRST
            arena[(last << BLOCK_BITS) + _NEXT] = block
            arena[(block << BLOCK_BITS) + _PREVIOUS] = last
            for k in range(_MAX_NGRAM):
                if arena[header + CURSORS + k] == tail:
                    arena[header + CURSORS + k] = start
            if arena[header + HEAD] == tail:
                arena[header + HEAD] = start
                _free_token_block(arena, pool, last)
            tail = start
        arena[tail] = token_ids[i]
        arena[header + TAIL] = tail + 1
        arena[header + NUM_TOKENS] += 1
        if begins and i == 0:
            _set_begins(arena, tail)
    return len(token_ids)


@kernel
def index(arena: Arena, pool: int, most: int) -> int:
    """Indexes n-grams behind the tail, the shortest first.

    Args:
        arena: all pools.
        pool: whose.
        most: how many n-grams to index.

    Returns:
        How many are done, fewer than `most`: none are left; -1: there is no room.
    """
    header = pool << BLOCK_BITS
    num_indexed = 0
    ngram_mask = word(arena, header + NGRAM_MASK)
    tail = word(arena, header + TAIL)
    for n in range(1, _MAX_NGRAM + 1):
        if not (ngram_mask >> (n - 1)) & 1:
            continue
        position = word(arena, header + CURSORS + n - 1)
        while position != tail:
            if num_indexed == most:
                return num_indexed
            if not _insert(arena, pool, position, n):
                return -1
            position = position_after(arena, position)
            arena[header + CURSORS + n - 1] = position
            arena[header + CURSOR_INDICES + n - 1] += 1
            num_indexed += 1
    return num_indexed


@kernel
def _insert(arena: Arena, pool: int, position: int, n: int) -> bool:
    """Adds the latest occurrence of the n-gram before the position; False: no room."""
    key = _key_before(arena, position, n)
    if key < 0:
        return True
    while True:
        page = page_of(arena, pool, key)
        at = next_slot(arena, page, first_slot(key), key)
        while arena[at + 2] != 0:
            latest = word(arena, at + 2)
            if _same_before(arena, latest, position, n):
                if not _link(arena, pool, latest, n, position):
                    return False
                arena[at + 2] = position
                return True
            at = next_slot(arena, page, slot_after(page, at), key)
        if may_fill(arena, page):
            fill_slot(arena, page, at, key, position)
            return True
        if not split_page(arena, pool, page):
            return False


@kernel
def _link(arena: Arena, pool: int, position: int, n: int, following: int) -> bool:
    at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _LINKS + n - 1
    if arena[at] == 0:
        arena[at] = take_block(arena, pool)
        if arena[at] == 0:
            return False
    arena[(word(arena, at) << BLOCK_BITS) + (position & _OFFSET)] = following
    return True


@kernel
def _remove(arena: Arena, pool: int, position: int, n: int) -> None:
    """Takes the earliest occurrence of the n-gram before the position out of the index."""
    key = _key_before(arena, position, n)
    page = page_of(arena, pool, key)
    at = next_slot(arena, page, first_slot(key), key)
    while arena[at + 1] != position:
        assert arena[at + 2] != 0, "what is indexed is found"
        at = next_slot(arena, page, slot_after(page, at), key)
    if arena[at + 2] == position:
        empty_slot(arena, pool, page, at)
    else:
        links_at = ((position >> BLOCK_BITS) << BLOCK_BITS) + _LINKS + n - 1
        links = word(arena, links_at) << BLOCK_BITS
        arena[at + 1] = arena[links + (position & _OFFSET)]


@kernel
def evict(arena: Arena, pool: int, num_text_tokens: int, most: int) -> int:
    """Forgets the oldest tokens, with every n-gram that begins at them; returns how many.

    Args:
        arena: all pools.
        pool: whose.
        num_text_tokens: how many tokens of the oldest text are there; no more are evicted.
        most: how many to evict.
    """
    header = pool << BLOCK_BITS
    ngram_mask = word(arena, header + NGRAM_MASK)
    count = min(most, num_text_tokens)
    for i in range(count):
        head = word(arena, header + HEAD)
        head_index = word(arena, header + HEAD_INDEX)
        position = head
        after_head = position_after(arena, head)
        for n in range(1, min(_MAX_NGRAM, num_text_tokens - i - 1) + 1):
            position = position_after(arena, position)
            if (ngram_mask >> (n - 1)) & 1:
                cursor_index = word(arena, header + CURSOR_INDICES + n - 1)
                # The cursor is n tokens past the head, or nearer: not indexed yet.
                if (cursor_index - head_index) & _MODULUS > n:
                    _remove(arena, pool, position, n)
        for k in range(_MAX_NGRAM):
            if (ngram_mask >> k) & 1 and arena[header + CURSORS + k] == head:
                arena[header + CURSORS + k] = after_head
                arena[header + CURSOR_INDICES + k] += 1
        arena[header + HEAD] = after_head
        arena[header + HEAD_INDEX] += 1
        arena[header + NUM_TOKENS] -= 1
        if after_head & _OFFSET == FIRST:
            _free_token_block(arena, pool, head >> BLOCK_BITS)
            arena[((after_head >> BLOCK_BITS) << BLOCK_BITS) + _PREVIOUS] = 0
        if i + 1 < num_text_tokens:
            _set_begins(arena, after_head)
    return count


@kernel
def _free_token_block(arena: Arena, pool: int, block: int) -> None:
    start = (block << BLOCK_BITS) + _LINKS
    for at in range(start, start + _MAX_NGRAM):
        if arena[at] != 0:
            give_back(arena, pool, word(arena, at))
    give_back(arena, pool, block)
