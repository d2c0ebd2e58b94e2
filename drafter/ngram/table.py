"""The hash tables of a text's n-gram index: memory layout, lookup, entry, growth. Kernels only.

The arrays belong to `text.py`; which n-grams are entered, and when, is decided in `index.py`.

An occurrence is named by its *end*: the n-gram is tokens [end - n, end), and a draft copied from it
starts at token `end`. A slot of a table is a word of 64 bits: an n-gram's earliest and latest end,
whether it occurred again, and 18 bits of its hash.

    bit  62 ... 45 | 44       | 43 ... 22  | 21 ....... 0
         hash      | repeated | latest end | earliest end (> 0)        0: an empty slot

A match of the hash bits is confirmed by comparing tokens, so a collision never changes an answer.
Slots are probed linearly within a chunk, at most `MAX_PROBES` of them; if an n-gram finds no slot,
the index of its text ends (`index.py`). A table is one chunk that doubles up to `CHUNK_SLOTS`; then
it grows by linear hashing over chunks: one chunk is split at a time, in order (chunk s into s and
s + 2^d). So growing moves at most a few thousand n-grams, and the memory per n-gram stays constant.

The header of a text, int64 words:

    0  address of the tokens, uint32       8   distance of the last draft's source (0: none)
    1  length: number of tokens            9   text length at which that draft was made
    2  min_ngram                           10  distance of the last accepted draft's source
    3  max_ngram                           11  indexed length, see `index.py`
    4  disjoint: 0 or 1                    12  1: there is an index; 0: the text is scanned (KMP)
    5  tie: 0 earliest 1 latest 2 longest  13  capacity: how many tokens fit in the buffer
    6  tokens_per_match                   14, 15  its pool, see `pool_index/link.py`
    16 + 3 j, for n = min_ngram + j: address of the directory, which is the list of the chunks'
       addresses; shape (number of chunks, the least 2^d - 1 that numbers them all << 24,
       log2(slots per chunk) << 48); entries

Growth: Litwin, "Linear hashing", VLDB 1980. Hash: a polynomial over the n-gram's tokens with a
secret odd base, mod 2^64, then multiplied and shifted. The last token has the power 1, so that
without the base nobody knows the hash of any n-gram, not even of one token.
"""

import numpy as np

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import (
    address_of,
    load_i64,
    load_u32,
    load_unaligned_u64,
    prefetch,
    signed,
    store_i64,
)

TOKENS, LENGTH, MIN_NGRAM, MAX_NGRAM, DISJOINT, TIE, TOKENS_PER_MATCH = range(7)
DRAFT_DISTANCE, DRAFTED_AT, ACCEPTED_DISTANCE, INDEXED_LENGTH, INDEXED, CAPACITY = range(8, 14)
TABLES = 16
TABLE_WORDS = 3
DIRECTORY, SHAPE, ENTRIES = range(3)

EARLIEST, LATEST, LONGEST = range(3)

MAX_NGRAM_TOKENS = 32
"""The largest n that a sequence may ask for."""

END_BITS = 22
END_MASK = MAX_TEXT_TOKENS = (1 << END_BITS) - 1
"""Longest text that can be indexed; the bits of a slot that hold an end."""
REPEATED = 1 << (2 * END_BITS)
TAG_SHIFT = 2 * END_BITS + 1

SLOT_BYTES = 8

MIN_SLOTS = 64
"""Slots of a new table."""
CHUNK_SLOTS = 8192
MAX_LOAD_PERCENT = 80
"""Entries per slot at which a single chunk is doubled; of several chunks, in the fullest one."""

ENTERED, MET_BEFORE, NO_SLOT = 0, -1, -2

MAX_PROBES = 1024
"""Slots examined for one n-gram. By chance none needs as many: in a chunk at its highest load the
longest run of full slots has some 400."""
PROBES_PER_ENTRY = 16
"""So many probes cost as much as entering one n-gram, and so many are free with each."""

MOVED_TOGETHER = 32
"""Entries of a chunk whose tokens are fetched while those before them are entered."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@kernel
def mix(hash_: np.uint64) -> np.uint64:
    """Spreads the bits of a polynomial over the word."""
    mixed = (hash_ ^ (hash_ >> np.uint64(32))) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


@kernel
def slot_bits_of(shape: int) -> int:
    """Returns log2 of the slots per chunk."""
    return shape >> 48


def shape_of(num_chunks: int, num_slots: int) -> int:
    """Returns the shape of a table, as its header holds it."""
    mask = (1 << (num_chunks - 1).bit_length()) - 1
    return num_chunks | mask << 24 | (num_slots.bit_length() - 1) << 48


@kernel
def chunk_number(shape: int, mixed: np.uint64) -> int:
    """Returns the number of the chunk that an n-gram belongs to."""
    # The number of chunks lies in [2^d, 2^(d + 1)): those already split use one more bit.
    mask = (shape >> 24) & 0xFFFFFF
    chunk = signed(mixed & np.uint64(0xFFFFFF)) & mask
    if chunk >= shape & 0xFFFFFF:
        chunk &= mask >> 1
    return chunk


@kernel
def directory_entry(table: int, mixed: np.uint64) -> int:
    """Returns the address of the directory's entry for the chunk that an n-gram belongs to."""
    number = chunk_number(load_i64(table + 8 * SHAPE), mixed)
    return load_i64(table + 8 * DIRECTORY) + 8 * number


@kernel
def home_of(mixed: np.uint64, slot_bits: int) -> int:
    """Returns the slot of a chunk at which the probing for an n-gram begins."""
    return signed(mixed >> np.uint64(26)) & ((1 << slot_bits) - 1)


@kernel
def tag_of(mixed: np.uint64) -> int:
    """Returns the hash bits that a slot holds."""
    return signed(mixed >> np.uint64(TAG_SHIFT + 1))


@kernel
def equal_tokens(first: int, second: int, count: int) -> bool:
    """Whether the tokens at two addresses are equal."""
    at = 4 * count
    while at >= 8:
        at -= 8
        if load_unaligned_u64(first + at) != load_unaligned_u64(second + at):
            return False
    return at == 0 or load_u32(first) == load_u32(second)


@kernel
def hash_at(tokens: int, end: int, n: int, base: np.uint64) -> np.uint64:
    """Returns the polynomial of tokens [end - n, end): the last token has the power 1."""
    hash_ = np.uint64(0)
    for i in range(end - n, end):
        hash_ = (hash_ + np.uint64(load_u32(tokens + 4 * i))) * base
    return hash_


@kernel
def earliest_of(slot: int) -> int:
    """Returns the earliest end in a slot's word."""
    return slot & END_MASK


@kernel
def latest_of(slot: int) -> int:
    """Returns the latest end in a slot's word."""
    return (slot >> END_BITS) & END_MASK


@kernel
def find(table: int, mixed: np.uint64, tokens: int, pattern: int, n: int) -> int:
    """Looks up an n-gram.

    Args:
        table: address of the table's words.
        mixed: the n-gram's mixed hash.
        tokens: address of the tokens of the text.
        pattern: address of the n-gram's tokens; 0: the hash bits are not confirmed, so another
            n-gram may be found, but none that is there is missed.
        n: its size.

    Returns:
        Its slot's word; 0: it is not there.
    """
    chunk = load_i64(directory_entry(table, mixed))
    slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
    slot = home_of(mixed, slot_bits)
    tag = tag_of(mixed)
    slot_mask = (1 << slot_bits) - 1
    for _ in range(MAX_PROBES):
        word = load_i64(chunk + SLOT_BYTES * slot)
        if word == 0:
            break
        if word >> TAG_SHIFT == tag and (
            pattern == 0 or equal_tokens(tokens + 4 * (earliest_of(word) - n), pattern, n)
        ):
            return word
        slot = (slot + 1) & slot_mask
    return 0


@kernel
def write_new(address: int, mixed: np.uint64, end: int) -> None:
    """Writes the only occurrence of an n-gram into an empty slot."""
    store_i64(address, tag_of(mixed) << TAG_SHIFT | end << END_BITS | end)


@kernel
def count_probes(num_probes: int, probes: int) -> None:
    """Adds the probes for one n-gram to the number at an address, if they are over the free."""
    if probes > PROBES_PER_ENTRY:
        store_i64(num_probes, load_i64(num_probes) + probes)


@kernel
def free_slot(chunk: int, slot_bits: int, mixed: np.uint64, num_probes: int) -> int:
    """Returns the address of the empty slot for an n-gram, see `enter`; 0: none is near."""
    slot_mask = (1 << slot_bits) - 1
    slot = home_of(mixed, slot_bits)
    for probes in range(MAX_PROBES):
        address = chunk + SLOT_BYTES * slot
        if load_i64(address) == 0:
            count_probes(num_probes, probes)
            return address
        slot = (slot + 1) & slot_mask
    count_probes(num_probes, MAX_PROBES)
    return 0


@kernel
def enter(
    chunk: int, slot_bits: int, tokens: int, mixed: np.uint64, end: int, n: int, num_probes: int
) -> int:
    """Enters an occurrence of an n-gram that is later than all that were entered.

    Args:
        chunk: address of its chunk.
        slot_bits: log2 of the slots per chunk.
        tokens: address of the tokens of the text.
        mixed: its mixed hash.
        end: where it ends.
        n: its size.
        num_probes: address of a number to which costly probing is added, see `count_probes`.

    Returns:
        `ENTERED` if it is the first; the first one's end if it is the second; `MET_BEFORE` if it
        is a later one; `NO_SLOT` if there is no slot for it.
    """
    tag = tag_of(mixed)
    slot_mask = (1 << slot_bits) - 1
    slot = home_of(mixed, slot_bits)
    for probes in range(MAX_PROBES):
        address = chunk + SLOT_BYTES * slot
        word = load_i64(address)
        if word == 0:
            write_new(address, mixed, end)
            count_probes(num_probes, probes)
            return ENTERED
        if word >> TAG_SHIFT == tag:
            known = earliest_of(word)
            if equal_tokens(tokens + 4 * (known - n), tokens + 4 * (end - n), n):
                store_i64(address, tag << TAG_SHIFT | REPEATED | end << END_BITS | known)
                count_probes(num_probes, probes)
                return MET_BEFORE if word & REPEATED != 0 else known
        slot = (slot + 1) & slot_mask
    count_probes(num_probes, MAX_PROBES)
    return NO_SLOT


@kernel
def room_in(table: int) -> int:
    """Returns how many n-grams may be entered before the table must grow."""
    shape = load_i64(table + 8 * SHAPE)
    # Chunks that are not split yet reach the highest load just before the last of them is split:
    # the others hold half as much.
    num_chunks = shape & 0xFFFFFF
    max_entries = ((1 << slot_bits_of(shape)) * (num_chunks + 1) * MAX_LOAD_PERCENT) // 200
    return max_entries - load_i64(table + 8 * ENTRIES)


@kernel
def move_entries(header: int, index: int, base: np.uint64, source: int, source_slots: int) -> None:
    """Empties a chunk and enters its n-grams again, after the table got a new shape.

    If there is no slot for one, the index of the text ends.

    Args:
        header: address of the text.
        index: of the table, whose directory and shape are the new ones.
        base: of the polynomial.
        source: address of the chunk; the table may continue to use it.
        source_slots: how many slots it has.
    """
    n = load_i64(header + 8 * MIN_NGRAM) + index
    table = header + 8 * (TABLES + TABLE_WORDS * index)
    tokens = load_i64(header + 8 * TOKENS)
    directory = load_i64(table + 8 * DIRECTORY)
    shape = load_i64(table + 8 * SHAPE)
    slot_bits = slot_bits_of(shape)
    num_probes = np.zeros(1, dtype=np.int64)

    # One pass per step, so that neither mispredicted branches nor waits for memory add up.
    words = np.empty(source_slots, dtype=np.int64)
    count = 0
    for slot in range(source_slots):
        word = load_i64(source + SLOT_BYTES * slot)
        words[count] = word
        store_i64(source + SLOT_BYTES * slot, 0)
        count += signed(word != 0)
    for first in range(0, count, MOVED_TOGETHER):
        stop = min(first + MOVED_TOGETHER, count)
        for i in range(stop, min(stop + MOVED_TOGETHER, count)):
            prefetch(tokens + 4 * (earliest_of(words[i]) - n))
        for i in range(first, stop):
            mixed = mix(hash_at(tokens, earliest_of(words[i]), n, base))
            chunk = load_i64(directory + 8 * chunk_number(shape, mixed))
            address = free_slot(chunk, slot_bits, mixed, address_of(num_probes))
            if address == 0:
                store_i64(header + 8 * INDEXED, 0)
                return
            store_i64(address, words[i])
