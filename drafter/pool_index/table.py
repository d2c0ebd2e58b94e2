"""The hash table of one pool: from an n-gram to its earliest and its latest occurrence.

Owns extendible hashing over the arena's blocks: growing or shrinking by one page moves only a few
hundred entries. Does not know texts: an occurrence is the position of the token after the n-gram.
Users confirm every hit by the tokens before it, so a collision never changes an answer.

    key        27 bits of the n-gram's hash, then n - 1 in 5 bits
    directory  2^depth page numbers, by the low bits of the hash
    page       count, local depth, prefix, -, then 340 slots of (key, earliest, latest); latest 0:
               the slot is empty. Linear probing from the high bits of the hash. A full page is
               split; if that is impossible, the pool is full.

The hash begins with the arena's secret seed, so that the hash of no n-gram is known.

Source: Fagin, Nievergelt, Pippenger, Strong, "Extendible hashing", ACM TODS 4 (1979).
"""

import numpy as np

from drafter.pool_index.arena import (
    BLOCK_BITS,
    BLOCK_WORDS,
    DEPTH,
    DIRECTORY_BLOCKS,
    DIRECTORY_PARTS,
    KEY_MASK,
    SEED_HIGH,
    SEED_LOW,
    Arena,
    allocate_block,
    free_block,
    has_room,
    word,
)
from servicekit.kernels.jit import kernel

NUM_SLOTS = 340
MAX_FILLED = 272
"""Most entries of a page: every search ends at an empty slot."""
assert MAX_FILLED < NUM_SLOTS
# A page with fewer entries is joined with its other half if both together have at most so many: a
# page that was just split has more, so pages are not split and joined over and over.
_JOIN_BELOW = 128
_JOINED_AT_MOST = 200

_COUNT = 0
_LOCAL_DEPTH = 1
_PREFIX = 2
_SLOTS = 4
_SLOT_WORDS = 3

MAX_DEPTH = 18
assert 1 << (MAX_DEPTH - BLOCK_BITS) <= DIRECTORY_PARTS

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@kernel
def seed_of(arena: Arena) -> np.uint64:
    """The hash of no tokens."""
    return (np.uint64(arena[SEED_HIGH]) << np.uint64(32)) | np.uint64(arena[SEED_LOW])


@kernel
def extend_hash(ngram_hash: np.uint64, token: int | np.uint32) -> np.uint64:
    """The hash of an n-gram with one more token before it: n-grams are hashed backwards."""
    ngram_hash = (ngram_hash ^ np.uint64(token)) * _MULTIPLIER
    return ngram_hash ^ (ngram_hash >> _SHIFT)


@kernel
def key_of(arena: Arena, ngram_hash: np.uint64, n: int) -> int:
    """The key that a slot holds of an n-gram."""
    high = int(np.int64((ngram_hash * _MULTIPLIER) >> np.uint64(37)))
    return ((high << 5) | (n - 1)) & word(arena, KEY_MASK)


@kernel
def first_slot(key: int) -> int:
    """The slot at which probing begins, by the bits that the directory does not use."""
    return ((key >> 23) * NUM_SLOTS) >> 9


@kernel
def _entry(arena: Arena, pool: int, index: int) -> int:
    """The place in the arena of the directory's entry of this index."""
    part = word(arena, (pool << BLOCK_BITS) + DIRECTORY_BLOCKS + (index >> BLOCK_BITS))
    return (part << BLOCK_BITS) + (index & (BLOCK_WORDS - 1))


@kernel
def page_of(arena: Arena, pool: int, key: int) -> int:
    """The page that a key belongs to."""
    depth = word(arena, (pool << BLOCK_BITS) + DEPTH)
    return word(arena, _entry(arena, pool, (key >> 5) & ((1 << depth) - 1)))


@kernel
def make_table(arena: Arena, pool: int) -> bool:
    """Makes the empty table of a new pool; needs room for two blocks."""
    part = allocate_block(arena, pool)
    page = allocate_block(arena, pool)
    arena[(pool << BLOCK_BITS) + DIRECTORY_BLOCKS] = part
    arena[part << BLOCK_BITS] = page
    return page != 0


@kernel
def next_slot(arena: Arena, page: int, slot: int, key: int) -> int:
    """The word of the first slot from `slot` on that has the key or is empty."""
    base = (page << BLOCK_BITS) + _SLOTS
    while True:
        at = base + slot * _SLOT_WORDS
        if arena[at + 2] == 0 or arena[at] == key:
            return at
        slot = slot + 1 if slot + 1 < NUM_SLOTS else 0


@kernel
def slot_after(page: int, at: int) -> int:
    """The number of the slot after the one whose word is `at`."""
    slot = (at - (page << BLOCK_BITS) - _SLOTS) // _SLOT_WORDS + 1
    return 0 if slot == NUM_SLOTS else slot


@kernel
def fill_slot(arena: Arena, page: int, at: int, key: int, earliest: int, latest: int) -> None:
    """Writes an entry into an empty slot."""
    arena[at] = key
    arena[at + 1] = earliest
    arena[at + 2] = latest
    arena[page << BLOCK_BITS] += 1


@kernel
def _put(arena: Arena, page: int, key: int, earliest: int, latest: int) -> None:
    """Adds an entry to a page; there may be others with its key."""
    base = (page << BLOCK_BITS) + _SLOTS
    slot = first_slot(key)
    while arena[base + slot * _SLOT_WORDS + 2] != 0:
        slot = slot + 1 if slot + 1 < NUM_SLOTS else 0
    fill_slot(arena, page, base + slot * _SLOT_WORDS, key, earliest, latest)


@kernel
def _double_directory(arena: Arena, pool: int) -> bool:
    header = pool << BLOCK_BITS
    depth = word(arena, header + DEPTH)
    size = 1 << depth
    if depth == MAX_DEPTH:
        return False
    num_parts = size >> BLOCK_BITS
    # One more for the page that the directory is doubled for.
    if not has_room(arena, pool, num_parts + 1):
        return False
    for i in range(num_parts):
        copy = allocate_block(arena, pool)
        original = word(arena, header + DIRECTORY_BLOCKS + i)
        arena[header + DIRECTORY_BLOCKS + num_parts + i] = copy
        for k in range(BLOCK_WORDS):
            arena[(copy << BLOCK_BITS) + k] = arena[(original << BLOCK_BITS) + k]
    if num_parts == 0:
        part = word(arena, header + DIRECTORY_BLOCKS) << BLOCK_BITS
        for i in range(size):
            arena[part + size + i] = arena[part + i]
    arena[header + DEPTH] = depth + 1
    return True


@kernel
def split_page(arena: Arena, pool: int, page: int) -> bool:
    """Splits a page into two by one more bit of the keys; False: no room."""
    base = page << BLOCK_BITS
    local_depth = word(arena, base + _LOCAL_DEPTH)
    if not has_room(arena, pool, 1):
        return False
    if local_depth == arena[(pool << BLOCK_BITS) + DEPTH] and not _double_directory(arena, pool):
        return False
    other = allocate_block(arena, pool)
    bit = 1 << local_depth
    prefix = word(arena, base + _PREFIX)
    arena[(other << BLOCK_BITS) + _LOCAL_DEPTH] = local_depth + 1
    arena[(other << BLOCK_BITS) + _PREFIX] = prefix | bit
    for index in range(prefix | bit, 1 << word(arena, (pool << BLOCK_BITS) + DEPTH), 2 * bit):
        arena[_entry(arena, pool, index)] = other

    slots = arena[base + _SLOTS : base + BLOCK_WORDS].copy()
    for i in range(base, base + BLOCK_WORDS):
        arena[i] = 0
    arena[base + _LOCAL_DEPTH] = local_depth + 1
    arena[base + _PREFIX] = prefix
    for i in range(0, len(slots), _SLOT_WORDS):
        if slots[i + 2] != 0:
            key = int(np.int64(slots[i]))
            to = other if (key >> 5) & bit else page
            _put(arena, to, key, slots[i + 1], slots[i + 2])
    return True


@kernel
def empty_slot(arena: Arena, pool: int, page: int, at: int) -> None:
    """Removes an entry, closes the gap, and joins the page with its other half if possible."""
    base = (page << BLOCK_BITS) + _SLOTS
    hole = (at - base) // _SLOT_WORDS
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < NUM_SLOTS else 0
        at_slot = base + slot * _SLOT_WORDS
        if arena[at_slot + 2] == 0:
            break
        home = first_slot(word(arena, at_slot))
        # It may move to the hole unless its probing begins after the hole.
        if hole <= slot:
            begins_after = hole < home <= slot
        else:
            begins_after = home > hole or home <= slot
        if not begins_after:
            for k in range(_SLOT_WORDS):
                arena[base + hole * _SLOT_WORDS + k] = arena[at_slot + k]
            hole = slot
    for k in range(_SLOT_WORDS):
        arena[base + hole * _SLOT_WORDS + k] = 0
    arena[page << BLOCK_BITS] -= 1
    _join_pages(arena, pool, page)


@kernel
def _join_pages(arena: Arena, pool: int, page: int) -> None:
    """Undoes splits for as long as a page and its other half are nearly empty."""
    while True:
        base = page << BLOCK_BITS
        local_depth = word(arena, base + _LOCAL_DEPTH)
        if local_depth == 0 or arena[base + _COUNT] >= _JOIN_BELOW:
            return
        bit = 1 << (local_depth - 1)
        prefix = word(arena, base + _PREFIX)
        other = word(arena, _entry(arena, pool, prefix ^ bit))
        other_base = other << BLOCK_BITS
        if (
            arena[other_base + _LOCAL_DEPTH] != local_depth
            or arena[base + _COUNT] + arena[other_base + _COUNT] > _JOINED_AT_MOST
        ):
            return
        if prefix & bit:
            page, other = other, page
            base, other_base = other_base, base
        prefix &= ~bit
        for i in range(other_base + _SLOTS, other_base + BLOCK_WORDS, _SLOT_WORDS):
            if arena[i + 2] != 0:
                _put(arena, page, word(arena, i), arena[i + 1], arena[i + 2])
        arena[base + _LOCAL_DEPTH] = local_depth - 1
        for index in range(prefix | bit, 1 << word(arena, (pool << BLOCK_BITS) + DEPTH), 2 * bit):
            arena[_entry(arena, pool, index)] = page
        free_block(arena, pool, other)


@kernel
def free_table(arena: Arena, pool: int) -> None:
    """Frees the table of an emptied pool."""
    header = pool << BLOCK_BITS
    size = 1 << word(arena, header + DEPTH)
    for index in range(size):
        page = word(arena, _entry(arena, pool, index))
        # Each page once: at the first index that leads to it.
        if arena[(page << BLOCK_BITS) + _PREFIX] == index:
            free_block(arena, pool, page)
    for i in range(max(1, size >> BLOCK_BITS)):
        free_block(arena, pool, word(arena, header + DIRECTORY_BLOCKS + i))
