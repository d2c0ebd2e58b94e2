"""Which n-grams of a text are in its index, and how the index follows the text. Kernels only.

There is a table per n-gram size (`table.py`). That of the smallest size holds every n-gram of the
size. A larger n-gram is entered only if its last n - 1 tokens occur more than once. So a text that
does not repeat itself costs one entry per token, however many sizes are matched.

When an (n-1)-gram occurs for the second time, the n-grams that end with its two occurrences enter
the table of n; so does the n-gram that ends with each later occurrence. For sizes 1 to 3, when all
of a b c a b is indexed:

    size 1   a, b, c
    size 2   c a   because a is repeated; its first occurrence begins the text
             a b   because b is repeated; both occurrences are entered, so a b is repeated too
    size 3   c a b because a b is repeated; its first occurrence begins the text

A lookup (`match.py`) begins with the smallest size. Let an (n-1)-gram be at the end of the text:

- If it is not in its table, no n-gram that ends with it occurs earlier.
- If it occurred once, the token before that occurrence says whether the n-gram occurred.
- If it is repeated, the table of n holds every n-gram that ends with it.

Of a text whose first `INDEXED_LENGTH` tokens are indexed, the tables of all sizes hold the
occurrences that end at least max_ngram tokens before that: none of them shares a token with the
suffix that it may match. A lookup scans the few tokens behind them.

If n-grams collide so much that a table has no slot for one, the text loses its index: it is scanned
from then on, as with `ALGORITHM_KMP`, and its drafts stay the same. The hash is secret, so this
does not happen by chance; who forces it gets what any client may ask for.
"""

import numpy as np

from drafter.ngram.table import (
    DIRECTORY,
    ENTERED,
    ENTRIES,
    INDEXED,
    INDEXED_LENGTH,
    LENGTH,
    MAX_NGRAM,
    MIN_NGRAM,
    NO_SLOT,
    PROBES_PER_ENTRY,
    SHAPE,
    SLOT_BYTES,
    TABLE_WORDS,
    TABLES,
    TOKENS,
    chunk_number,
    earliest_of,
    enter,
    free_slot,
    hash_at,
    home_of,
    mix,
    room_in,
    slot_bits_of,
    write_new,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, load_u32, prefetch, signed, store_i64

DONE, BUDGET_SPENT, MUST_SCAN, MUST_GROW = range(4)
"""Status of a text: the kernel did all it was asked for; the budget was spent first; the text must
be scanned for longer than one call may; its table `status - MUST_GROW` must grow first."""

BLOCK = 32
"""Ends that are entered together: their slots are fetched before the first is examined."""

SCRATCH_WORDS = 8 * BLOCK + 1
"""Int64 words that entering a block works on."""


@kernel
def count_unindexed(header: int) -> int:
    """Returns how many of a text's last tokens are not indexed yet; 0 if it has no index."""
    if load_i64(header + 8 * INDEXED) == 0:
        return 0
    return load_i64(header + 8 * LENGTH) - load_i64(header + 8 * INDEXED_LENGTH)


@kernel
def room_for_block(header: int) -> tuple[int, int]:
    """Returns (how many ends may be entered, the table that allows no more)."""
    num_tables = load_i64(header + 8 * MAX_NGRAM) - load_i64(header + 8 * MIN_NGRAM) + 1
    max_ends, fullest = room_in(header + 8 * TABLES), 0
    for index in range(1, num_tables):
        room = room_in(header + 8 * (TABLES + TABLE_WORDS * index)) // 2
        if room < max_ends:
            max_ends, fullest = room, index
    return max_ends, fullest


@kernel
def fetch_slots(header: int, index: int, count: int, hashes: int, mixed: int, chunks: int) -> None:
    """Prefetches the slots at which the probing for n-grams of one size begins.

    Args:
        header: address of the text.
        index: of the table.
        count: how many n-grams.
        hashes: address of their polynomials.
        mixed: address that receives their mixed hashes.
        chunks: address that receives the addresses of their chunks.
    """
    table = header + 8 * (TABLES + TABLE_WORDS * index)
    shape = load_i64(table + 8 * SHAPE)
    slot_bits = slot_bits_of(shape)
    directory = load_i64(table + 8 * DIRECTORY)
    for i in range(count):
        mixed_hash = mix(np.uint64(load_i64(hashes + 8 * i)))
        chunk = load_i64(directory + 8 * chunk_number(shape, mixed_hash))
        store_i64(mixed + 8 * i, signed(mixed_hash))
        store_i64(chunks + 8 * i, chunk)
        prefetch(chunk + SLOT_BYTES * home_of(mixed_hash, slot_bits))


@kernel
def fetch_known(header: int, n: int, slot_bits: int, count: int, mixed: int, chunks: int) -> None:
    """Prefetches the tokens that n-grams will be compared with, after `fetch_slots`."""
    tokens = load_i64(header + 8 * TOKENS)
    for i in range(count):
        slot = home_of(np.uint64(load_i64(mixed + 8 * i)), slot_bits)
        word = load_i64(load_i64(chunks + 8 * i) + SLOT_BYTES * slot)
        prefetch(tokens + 4 * (earliest_of(word) - n))


@kernel
def extend_hash(tokens: int, hash_: np.uint64, end: int, n: int, power: np.uint64) -> int:
    """Returns the polynomial of an n-gram with the token before it; power: the base to n + 1."""
    return signed(hash_ + np.uint64(load_u32(tokens + 4 * (end - n - 1))) * power)


@kernel
def enter_block(header: int, base: np.uint64, block: int, scratch: int) -> int:
    """Indexes the next tokens of a text, size by size; ends its index if a table has no slot.

    Args:
        header: address of the text, whose tables all have room for the block.
        base: of the polynomial.
        block: how many tokens, at most `BLOCK`.
        scratch: address of `SCRATCH_WORDS` words.

    Returns:
        The cost, in n-grams entered.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    indexed = load_i64(header + 8 * INDEXED_LENGTH)
    tokens = load_i64(header + 8 * TOKENS)
    # Ends and polynomials of the n-grams to enter: of this size, of the next size, and first
    # occurrences of n-grams that are repeated now. Those are not in their table yet, nor any equal.
    ends, hashes = scratch, scratch + 8 * BLOCK
    next_ends, next_hashes = scratch + 16 * BLOCK, scratch + 24 * BLOCK
    first_ends, first_hashes = scratch + 32 * BLOCK, scratch + 40 * BLOCK
    mixed, chunks = scratch + 48 * BLOCK, scratch + 56 * BLOCK
    num_probes = scratch + 64 * BLOCK
    store_i64(num_probes, 0)

    last = indexed + block - max_ngram
    count, num_first, num_entered = 0, 0, 0
    for end in range(max(min_ngram, last - block + 1), last + 1):
        store_i64(ends + 8 * count, end)
        store_i64(hashes + 8 * count, signed(hash_at(tokens, end, min_ngram, base)))
        count += 1
    power = base
    for _ in range(min_ngram):
        power *= base
    for n in range(min_ngram, max_ngram + 1):
        index = n - min_ngram
        table = header + 8 * (TABLES + TABLE_WORDS * index)
        slot_bits = slot_bits_of(load_i64(table + 8 * SHAPE))
        fetch_slots(header, index, num_first, first_hashes, mixed, chunks)
        for i in range(num_first):
            mixed_hash = np.uint64(load_i64(mixed + 8 * i))
            slot = free_slot(load_i64(chunks + 8 * i), slot_bits, mixed_hash, num_probes)
            if slot == 0:
                return end_index(header, num_entered, num_probes)
            write_new(slot, mixed_hash, load_i64(first_ends + 8 * i))
        num_entered += num_first + count
        num_new, num_first, num_next = num_first, 0, 0

        fetch_slots(header, index, count, hashes, mixed, chunks)
        fetch_known(header, n, slot_bits, count, mixed, chunks)
        for i in range(count):
            end = load_i64(ends + 8 * i)
            mixed_hash = np.uint64(load_i64(mixed + 8 * i))
            chunk = load_i64(chunks + 8 * i)
            known = enter(chunk, slot_bits, tokens, mixed_hash, end, n, num_probes)
            if known == NO_SLOT:
                return end_index(header, num_entered, num_probes)
            if known == ENTERED:
                num_new += 1
            elif n < max_ngram:
                hash_ = np.uint64(load_i64(hashes + 8 * i))
                # An occurrence that begins the text is part of no larger n-gram.
                if known > n:
                    store_i64(first_ends + 8 * num_first, known)
                    extended = extend_hash(tokens, hash_, known, n, power)
                    store_i64(first_hashes + 8 * num_first, extended)
                    num_first += 1
                store_i64(next_ends + 8 * num_next, end)
                extended = extend_hash(tokens, hash_, end, n, power)
                store_i64(next_hashes + 8 * num_next, extended)
                num_next += 1
        store_i64(table + 8 * ENTRIES, load_i64(table + 8 * ENTRIES) + num_new)
        power *= base
        ends, next_ends = next_ends, ends
        hashes, next_hashes = next_hashes, hashes
        count = num_next
    store_i64(header + 8 * INDEXED_LENGTH, indexed + block)
    return num_entered + load_i64(num_probes) // PROBES_PER_ENTRY


@kernel
def end_index(header: int, num_entered: int, num_probes: int) -> int:
    """Ends the index of a text; returns the cost as `enter_block` does."""
    store_i64(header + 8 * INDEXED, 0)
    return num_entered + load_i64(num_probes) // PROBES_PER_ENTRY


@kernel
def catch_up(header: int, base: np.uint64, budget: int, scratch: int) -> tuple[int, int]:
    """Indexes all tokens of a text; returns (status, cost in n-grams entered).

    Args:
        header: address of the text.
        base: of the polynomial.
        budget: once the cost has reached it, no further block begins.
        scratch: address of `SCRATCH_WORDS` words.
    """
    spent = 0
    num_unindexed = count_unindexed(header)
    while num_unindexed > 0:
        if spent >= budget:
            return BUDGET_SPENT, spent
        room, fullest = room_for_block(header)
        if room == 0:
            return MUST_GROW + fullest, spent
        spent += enter_block(header, base, min(BLOCK, num_unindexed, room), scratch)
        num_unindexed = count_unindexed(header)
    return DONE, spent
