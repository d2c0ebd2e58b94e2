"""Which n-grams of one pool's texts are in its table, and where each occurs again.

Owns the links from occurrence to occurrence and a *cursor* per n: n-grams that end before it are
indexed, and `index` moves it towards the tail in small steps. Does not know when tokens come and go
(`text.py`), nor the layout of the table (`table.py`).

    n-gram  of n tokens, named by the position of the token that follows it in the same text
    link    in the side block of n, at a position: the next occurrence of the n-gram that ends
            before that position

Occurrences of an n-gram are linked from the earliest to the latest, and the oldest token is evicted
first. So an evicted occurrence is the earliest one, and its link names the new earliest: the table
stays exact.
"""

from drafter.ngram.table import MAX_NGRAM_TOKENS
from drafter.pool_index.arena import (
    BLOCK_BITS,
    CURSOR_INDICES,
    CURSORS,
    HEAD,
    HEAD_INDEX,
    NGRAM_MASK,
    TAIL,
    Arena,
    word,
)
from drafter.pool_index.table import (
    MAX_FILLED,
    empty_slot,
    extend_hash,
    fill_slot,
    first_slot,
    key_of,
    next_slot,
    page_of,
    seed_of,
    slot_after,
    split_page,
)
from drafter.pool_index.tokens import (
    begins_at,
    link_of,
    position_after,
    position_before,
    set_link,
)
from servicekit.kernels.jit import kernel

_MODULUS = 0xFFFFFFFF


@kernel
def index_ngrams_of(arena: Arena, pool: int, ngram_mask: int) -> None:
    """Adds n-gram sizes to the pool's index; `index` does the work later."""
    header = pool << BLOCK_BITS
    for n in range(1, MAX_NGRAM_TOKENS + 1):
        bit = 1 << (n - 1)
        if ngram_mask & bit and not word(arena, header + NGRAM_MASK) & bit:
            arena[header + NGRAM_MASK] = word(arena, header + NGRAM_MASK) | bit
            arena[header + CURSORS + n - 1] = arena[header + HEAD]
            arena[header + CURSOR_INDICES + n - 1] = arena[header + HEAD_INDEX]


@kernel
def index(arena: Arena, pool: int, max_ngrams: int) -> int:
    """Indexes up to so many n-grams of a pool, the shortest first.

    Returns:
        How many; fewer than `max_ngrams`: none are left; -1: there is no room.
    """
    header = pool << BLOCK_BITS
    num_indexed = 0
    ngram_mask = word(arena, header + NGRAM_MASK)
    tail = word(arena, header + TAIL)
    for n in range(1, MAX_NGRAM_TOKENS + 1):
        if not (ngram_mask >> (n - 1)) & 1:
            continue
        position = word(arena, header + CURSORS + n - 1)
        while position != tail:
            if num_indexed == max_ngrams:
                return num_indexed
            if not _insert(arena, pool, position, n):
                return -1
            position = position_after(arena, position)
            arena[header + CURSORS + n - 1] = position
            arena[header + CURSOR_INDICES + n - 1] += 1
            num_indexed += 1
    return num_indexed


@kernel
def move_cursors(arena: Arena, pool: int, position: int, to: int) -> None:
    """Moves the cursors at a position to another position that names the same place."""
    header = pool << BLOCK_BITS
    for at in range(header + CURSORS, header + CURSORS + MAX_NGRAM_TOKENS):
        if arena[at] == position:
            arena[at] = to


@kernel
def unindex_head(arena: Arena, pool: int, num_text_tokens: int) -> None:
    """Removes every n-gram that begins at the oldest token, before that is evicted.

    Of the oldest text, `num_text_tokens` tokens are in the pool.
    """
    header = pool << BLOCK_BITS
    ngram_mask = word(arena, header + NGRAM_MASK)
    head = word(arena, header + HEAD)
    head_index = word(arena, header + HEAD_INDEX)
    position = head
    for n in range(1, min(MAX_NGRAM_TOKENS, num_text_tokens - 1) + 1):
        position = position_after(arena, position)
        if (ngram_mask >> (n - 1)) & 1:
            cursor_index = word(arena, header + CURSOR_INDICES + n - 1)
            # With the cursor at most n tokens past the head it is not indexed yet.
            if (cursor_index - head_index) & _MODULUS > n:
                _remove(arena, pool, position, n)
    for k in range(MAX_NGRAM_TOKENS):
        if (ngram_mask >> k) & 1 and arena[header + CURSORS + k] == head:
            arena[header + CURSORS + k] = position_after(arena, head)
            arena[header + CURSOR_INDICES + k] += 1


@kernel
def _key_before(arena: Arena, position: int, n: int) -> int:
    """The key of the n tokens before a position; -1 if its text has fewer."""
    ngram_hash = seed_of(arena)
    for _ in range(n):
        if begins_at(arena, position):
            return -1
        position = position_before(arena, position)
        ngram_hash = extend_hash(ngram_hash, word(arena, position))
    return key_of(arena, ngram_hash, n)


@kernel
def _same_before(arena: Arena, one: int, other: int, n: int) -> bool:
    """Whether the n tokens before two positions are equal; their texts have as many."""
    for _ in range(n):
        one = position_before(arena, one)
        other = position_before(arena, other)
        if arena[one] != arena[other]:
            return False
    return True


@kernel
def _insert(arena: Arena, pool: int, position: int, n: int) -> bool:
    """Adds the latest occurrence of the n-gram before a position; False: no room."""
    key = _key_before(arena, position, n)
    if key < 0:
        return True
    while True:
        page = page_of(arena, pool, key)
        at = next_slot(arena, page, first_slot(key), key)
        while arena[at + 2] != 0:
            latest = word(arena, at + 2)
            if _same_before(arena, latest, position, n):
                if not set_link(arena, pool, latest, n, position):
                    return False
                arena[at + 2] = position
                return True
            at = next_slot(arena, page, slot_after(page, at), key)
        if word(arena, page << BLOCK_BITS) < MAX_FILLED:
            fill_slot(arena, page, at, key, position, position)
            return True
        if not split_page(arena, pool, page):
            return False


@kernel
def _remove(arena: Arena, pool: int, position: int, n: int) -> None:
    """Removes the earliest occurrence, at a position, of the n-gram before it."""
    key = _key_before(arena, position, n)
    page = page_of(arena, pool, key)
    at = next_slot(arena, page, first_slot(key), key)
    while arena[at + 1] != position:
        assert arena[at + 2] != 0, "what is indexed is found"
        at = next_slot(arena, page, slot_after(page, at), key)
    latest = word(arena, at + 2)
    if latest == position:
        empty_slot(arena, pool, page, at)
        return
    arena[at + 1] = link_of(arena, position, n)
