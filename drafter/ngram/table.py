"""The tables of a text's hash index: how they lie in memory, look-up, entry, growth. Kernels only;
the arrays they work on belong to `indexed_text.py`. Which n-grams are entered when is decided in
`ngram_index.py`.

An occurrence is named by its *end*: the n-gram is tokens [end - n, end), and a draft from it starts
at token `end`. A table's slot holds one end, whether the n-gram was met again, and 9 bits of its
hash,

    bit  31 ... 23 | 22             | 21 ...... 0      TIE_LONGEST: a second word, the latest end
         hash      | met repeatedly | end (> 0)        0: an empty slot

and what the bits let through is confirmed against the tokens, so that a collision never changes an
answer. Slots are probed linearly within a chunk, `MAX_PROBES` of them at most: an n-gram that finds
no slot so near ends the index of its text (`ngram_index.py`). A table is one chunk that doubles up
to `CHUNK_SLOTS`, and from then on linear hashing over chunks: one chunk is split at a time, in
order (chunk s into s and s + 2^d), so growing moves a few thousand n-grams at most and the memory
per n-gram stays the same at every size.

A text's header, words of int64, from its address on:

    0  address of the tokens, uint32       8   distance of the last draft's source (0: none)
    1  length: how many are known          9   text length at which that draft was made
    2  min_ngram                           10  distance of the last accepted draft's source
    3  max_ngram                           11  how long the text was that the index is of
    4  disjoint: 0 or 1                    12  indexed: 1; else scanned (KMP)
    5  tie: 0 earliest 1 latest 2 longest  13  how many tokens fit where they are
    6  tokens_per_match                   14, 15  its pool, see `pool_link.py`
    7  chained: 0 or 1
    16 + 4 j, for n = min_ngram + j: address of the chunks' addresses; shape (number of chunks,
       the least 2^d - 1 that numbers them all << 24, log2(slots per chunk) << 48); entries;
       whether the next n-gram of this size is to be entered

Source of the growth: Litwin, "Linear hashing", VLDB 1980. Hash: a polynomial over the n-gram's
tokens with a secret odd base, mod 2^64, then multiplied and shifted. The last token has the power
1, so that no n-gram's hash is known to who does not know the base, not even that of one token.
"""

import numpy as np

from drafter.kernels.jit import kernel
from drafter.kernels.memory import (
    load_i64,
    load_u32,
    load_unaligned_u64,
    prefetch,
    signed,
    store_i64,
    store_u32,
)

TOKENS, LENGTH, MIN_NGRAM, MAX_NGRAM, DISJOINT, TIE, TOKENS_PER_MATCH, CHAINED = range(8)
DRAFT_DISTANCE, DRAFT_LENGTH, ACCEPTED_DISTANCE, INDEXED_LENGTH, INDEXED, CAPACITY = range(8, 14)
TABLES = 16
TABLE_WORDS = 4
DIRECTORY, SHAPE, ENTRIES, PENDING = range(4)

EARLIEST, LATEST, LONGEST = range(3)

END_BITS = 22
MAX_TEXT_TOKENS = (1 << END_BITS) - 1
"""Longest text that can be indexed."""

MIN_SLOTS = 64
"""Slots of a new table."""

CHUNK_SLOTS = 8192
MAX_LOAD_PERCENT = 80
"""Entries per slot at which a single chunk is doubled; the fullest chunk of several."""

END_MASK = (1 << END_BITS) - 1
REPEATED = 1 << END_BITS
ENTERED, MET_BEFORE, NO_SLOT = 0, -1, -2

MAX_PROBES = 1024
"""How many slots are looked at for one n-gram. By chance none needs as many: in a chunk at its
highest load the longest run of full slots has some 400."""
PROBES_PER_ENTRY = 16
"""So many probes cost as much as entering one n-gram does; so many are free with each."""

MOVED_TOGETHER = 32
"""Entries of a chunk whose tokens are fetched while those before them are entered."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_U0 = np.uint64(0)


@kernel
def mix(hash_: np.uint64) -> np.uint64:
    """Spreads a polynomial's bits over the word."""
    mixed = (hash_ ^ (hash_ >> np.uint64(32))) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))


@kernel
def num_chunks_of(shape: int) -> int:
    """Returns how many chunks a table of this shape has."""
    return shape & 0xFFFFFF


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
    """Returns which chunk of a table an n-gram belongs to."""
    # The number of chunks lies in [2^d, 2^(d + 1)): those already split use one more bit.
    mask = (shape >> 24) & 0xFFFFFF
    chunk = signed(mixed & np.uint64(0xFFFFFF)) & mask
    if chunk >= shape & 0xFFFFFF:
        chunk &= mask >> 1
    return chunk


@kernel
def directory_entry(table: int, mixed: np.uint64) -> int:
    """Returns the address of the address of the chunk that an n-gram belongs to."""
    number = chunk_number(load_i64(table + 8 * SHAPE), mixed)
    return load_i64(table + 8 * DIRECTORY) + 8 * number


@kernel
def home_of(mixed: np.uint64, slot_bits: int) -> int:
    """Returns the slot of a chunk at which an n-gram's probing begins."""
    return signed(mixed >> np.uint64(26)) & ((1 << slot_bits) - 1)


@kernel
def tag_of(mixed: np.uint64) -> int:
    """Returns the hash bits that a slot holds."""
    return signed(mixed >> np.uint64(64 - 31 + END_BITS))


@kernel
def equal_tokens(first: int, second: int, count: int) -> bool:
    """Whether the tokens at two addresses agree."""
    at = 4 * count
    while at >= 8:
        at -= 8
        if load_unaligned_u64(first + at) != load_unaligned_u64(second + at):
            return False
    return at == 0 or load_u32(first) == load_u32(second)


@kernel
def hash_at(tokens: int, end: int, n: int, base: np.uint64) -> np.uint64:
    """Returns the polynomial of tokens [end - n, end): the last token has the power 1."""
    hash_ = _U0
    for i in range(end - n, end):
        hash_ = (hash_ + np.uint64(load_u32(tokens + 4 * i))) * base
    return hash_


@kernel
def find(
    table: int, slot_words: int, mixed: np.uint64, tokens: int, pattern: int, n: int
) -> tuple[int, int, bool]:
    """Looks an n-gram up.

    Args:
        table: address of the table's words.
        slot_words: words per slot: 2 with `TIE_LONGEST`, else 1.
        mixed: the n-gram's mixed hash.
        tokens: address of the tokens of the text.
        pattern: address of the n-gram's own tokens; 0: the hash bits in a slot are believed, and
            what is found may be another n-gram; but what is there is never missed.
        n: its size.

    Returns:
        (end, latest end, whether it was met again): the ends are the same without a second word;
        0 if it is not there.
    """
    chunk = load_i64(directory_entry(table, mixed))
    slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
    slot = home_of(mixed, slot_bits)
    tag = tag_of(mixed)
    slot_mask = (1 << slot_bits) - 1
    for _ in range(MAX_PROBES):
        address = chunk + 4 * slot_words * slot
        word = signed(load_u32(address))
        if word == 0:
            break
        if word >> (END_BITS + 1) == tag:
            end = word & END_MASK
            if pattern == 0 or equal_tokens(tokens + 4 * (end - n), pattern, n):
                latest = signed(load_u32(address + 4)) if slot_words == 2 else end
                return end, latest, word & REPEATED != 0
        slot = (slot + 1) & slot_mask
    return 0, 0, False


@kernel
def _write_new(address: int, slot_words: int, tag: int, end: int) -> None:
    store_u32(address, np.uint32(tag << (END_BITS + 1) | end))
    if slot_words == 2:
        store_u32(address + 4, np.uint32(end))


@kernel
def count_probes(effort: int, probes: int) -> None:
    """Adds to the number at an address what was probed for one n-gram beyond what is free."""
    if probes > PROBES_PER_ENTRY:
        store_i64(effort, load_i64(effort) + probes)


@kernel
def free_slot(chunk: int, slot_bits: int, slot_words: int, mixed: np.uint64, effort: int) -> int:
    """Returns the address of the empty slot that an n-gram goes to; 0: there is none near."""
    slot_mask = (1 << slot_bits) - 1
    slot = home_of(mixed, slot_bits)
    for probes in range(MAX_PROBES):
        address = chunk + 4 * slot_words * slot
        if load_u32(address) == 0:
            count_probes(effort, probes)
            return address
        slot = (slot + 1) & slot_mask
    count_probes(effort, MAX_PROBES)
    return 0


@kernel
def enter_new(
    chunk: int, slot_bits: int, tie: int, mixed: np.uint64, end: int, effort: int
) -> bool:
    """Enters an n-gram of which none of its kind was entered, see `enter`; False: no slot."""
    slot_words = 2 if tie == LONGEST else 1
    address = free_slot(chunk, slot_bits, slot_words, mixed, effort)
    if address == 0:
        return False
    _write_new(address, slot_words, tag_of(mixed), end)
    return True


@kernel
def enter(
    chunk: int,
    slot_bits: int,
    tie: int,
    tokens: int,
    mixed: np.uint64,
    end: int,
    n: int,
    effort: int,
) -> int:
    """Enters an n-gram that ends later than all of its kind that were entered.

    Args:
        chunk: address of its chunk.
        slot_bits: log2 of the slots per chunk.
        tie: which of its ends are kept.
        tokens: address of the tokens of the text.
        mixed: its mixed hash.
        end: where it ends.
        n: its size.
        effort: address of a number, to which many probes are added.

    Returns:
        `ENTERED` if it is the first of its kind; the end of that if it is the second;
        `MET_BEFORE` if there are more; `NO_SLOT` if it is not known whether there are, and there is
        no slot for it.
    """
    slot_words = 2 if tie == LONGEST else 1
    tag = tag_of(mixed)
    slot_mask = (1 << slot_bits) - 1
    slot = home_of(mixed, slot_bits)
    for probes in range(MAX_PROBES):
        address = chunk + 4 * slot_words * slot
        word = signed(load_u32(address))
        if word == 0:
            _write_new(address, slot_words, tag, end)
            count_probes(effort, probes)
            return ENTERED
        if word >> (END_BITS + 1) == tag:
            known = word & END_MASK
            if equal_tokens(tokens + 4 * (known - n), tokens + 4 * (end - n), n):
                if tie == LATEST:
                    store_u32(address, np.uint32((word ^ known) | REPEATED | end))
                else:
                    store_u32(address, np.uint32(word | REPEATED))
                if slot_words == 2:
                    store_u32(address + 4, np.uint32(end))
                count_probes(effort, probes)
                return MET_BEFORE if word & REPEATED != 0 else known
        slot = (slot + 1) & slot_mask
    count_probes(effort, MAX_PROBES)
    return NO_SLOT


@kernel
def room_in(table: int) -> int:
    """Returns how many n-grams may be entered before the table must grow."""
    shape = load_i64(table + 8 * SHAPE)
    # So much that the chunks of which none was split yet reach the highest load just before the
    # last of them is: the others hold half as much.
    most = ((1 << slot_bits_of(shape)) * (num_chunks_of(shape) + 1) * MAX_LOAD_PERCENT) // 200
    return most - load_i64(table + 8 * ENTRIES)


@kernel
def move_entries(header: int, index: int, base: np.uint64, source: int, source_slots: int) -> None:
    """Enters what one chunk held, once the table has its new shape; the chunk is emptied.

    If there is no slot for an n-gram, the index of the text ends.

    Args:
        header: address of the text.
        index: which table; its directory and shape are the new ones.
        base: of the polynomial.
        source: address of the chunk; it may be one that the table goes on using.
        source_slots: how many slots it has.
    """
    n = load_i64(header + 8 * MIN_NGRAM) + index
    table = header + 8 * (TABLES + TABLE_WORDS * index)
    slot_words = 2 if load_i64(header + 8 * TIE) == LONGEST else 1
    tokens = load_i64(header + 8 * TOKENS)
    directory = load_i64(table + 8 * DIRECTORY)
    shape = load_i64(table + 8 * SHAPE)
    slot_bits = slot_bits_of(shape)
    effort = np.zeros(1, dtype=np.int64)

    # Step by step over all of them, so that neither a branch that cannot be predicted nor a wait
    # for memory holds up what comes after it.
    words = np.empty(source_slots * slot_words, dtype=np.uint32)
    count = 0
    for slot in range(source_slots):
        address = source + 4 * slot_words * slot
        word = load_u32(address)
        words[count * slot_words] = word
        if slot_words == 2:
            words[2 * count + 1] = load_u32(address + 4)
            store_u32(address + 4, np.uint32(0))
        store_u32(address, np.uint32(0))
        count += signed(word != 0)
    for first in range(0, count, MOVED_TOGETHER):
        stop = min(first + MOVED_TOGETHER, count)
        for i in range(stop, min(stop + MOVED_TOGETHER, count)):
            prefetch(tokens + 4 * ((signed(words[i * slot_words]) & END_MASK) - n))
        for i in range(first, stop):
            word = words[i * slot_words]
            spread = mix(hash_at(tokens, signed(word) & END_MASK, n, base))
            chunk = load_i64(directory + 8 * chunk_number(shape, spread))
            address = free_slot(chunk, slot_bits, slot_words, spread, effort.ctypes.data)
            if address == 0:
                store_i64(header + 8 * INDEXED, 0)
                return
            store_u32(address, word)
            if slot_words == 2:
                store_u32(address + 4, words[2 * i + 1])
