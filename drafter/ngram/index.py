"""Which n-grams of a text are in its index, and how the index follows the text. Kernels only; where
they lie is known to `ngram_table.py`.

An n-gram that occurs once is found by any part of it. So the table of the smallest size holds every
n-gram of that size, and each larger size only those whose last n - 1 tokens were met before: when
an (n-1)-gram is met for the second time, what ends at the first goes into the table of n, and so
does what ends at the second, and so on from size to size. Text that does not repeat costs one entry
per token, whatever sizes are asked for; and of what repeats, that (`match_kernel.py` reads it from
the smallest size on):

- An (n-1)-gram that is not in its table has no n-gram in the next one.
- One that was met once has one n-gram that it can belong to: the tokens before it say which.
- All n-grams that end in one that was met again are in the table of n.

An n-gram that ends at `end` counts when the text has `end + lag` tokens: lag n where an occurrence
may not overlap the suffix that it matches, else 1. The index is always that of one length of the
text, `INDEXED_LENGTH`, in all sizes: the latest end in a table is one that counts. With lag n the
sizes are one token apart, so that the last of the smaller one's ends has yet to go into the larger
one's table: a table's `PENDING` word says whether it is to.

A text whose n-grams collide so much that a table has no slot for one is not indexed any more: it is
scanned from then on, as with `ALGORITHM_KMP`, and the answers are the same. With a secret hash that
does not happen by chance; whoever brings it about gets what is anyone's for the asking.
"""

import numpy as np

from drafter.kernels.jit import kernel
from drafter.kernels.memory import load_i64, load_u32, prefetch, signed, store_i64
from drafter.ngram.table import (
    DIRECTORY,
    DISJOINT,
    END_MASK,
    ENTERED,
    ENTRIES,
    INDEXED,
    INDEXED_LENGTH,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    NO_SLOT,
    PENDING,
    PROBES_PER_ENTRY,
    SHAPE,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    chunk_number,
    enter,
    enter_new,
    hash_at,
    home_of,
    mix,
    room_in,
    slot_bits_of,
)

DONE, BEHIND, MUST_SCAN, MUST_GROW = range(4)
"""What became of a text: all is entered; the budget ran out; it has to be scanned for its draft for
longer than one call may take; its table `status - MUST_GROW` must grow first."""

BLOCK = 32
"""Ends that are entered together: their slots are fetched before the first is looked at."""

SCRATCH_WORDS = 8 * BLOCK + 1
"""Of int64, that the entering of a block works on."""


@kernel
def lag_of(n: int, disjoint: bool) -> int:
    """Returns by how much an n-gram lies before the end of the text when it counts."""
    return n if disjoint else 1


@kernel
def lacks(header: int) -> int:
    """Returns how many of a text's last tokens its index does not know."""
    if load_i64(header + 8 * INDEXED) == 0:
        return 0
    return load_i64(header + 8 * LENGTH) - load_i64(header + 8 * INDEXED_LENGTH)


@kernel
def room_for_block(header: int) -> tuple[int, int]:
    """Returns (how many ends may be entered, the table that says so)."""
    num_tables = load_i64(header + 8 * MAX_NGRAM) - load_i64(header + 8 * MIN_NGRAM) + 1
    most, fullest = room_in(header + 8 * TABLES), 0
    for index in range(1, num_tables):
        room = room_in(header + 8 * (TABLES + TABLE_WORDS * index)) // 2
        if room < most:
            most, fullest = room, index
    return most, fullest


@kernel
def fetch_slots(header: int, index: int, count: int, hashes: int, mixed: int, chunks: int) -> None:
    """Asks for the slots at which the probing for n-grams of one size begins.

    Args:
        header: address of the text.
        index: of the table.
        count: how many n-grams.
        hashes: address of their polynomials.
        mixed: address that takes their mixed hashes.
        chunks: address that takes the addresses of their chunks.
    """
    table = header + 8 * (TABLES + TABLE_WORDS * index)
    slot_bytes = 8 if load_i64(header + 8 * TIE) == LONGEST else 4
    shape = load_i64(table + 8 * SHAPE)
    slot_bits = slot_bits_of(shape)
    directory = load_i64(table + 8 * DIRECTORY)
    for i in range(count):
        spread = mix(np.uint64(load_i64(hashes + 8 * i)))
        chunk = load_i64(directory + 8 * chunk_number(shape, spread))
        store_i64(mixed + 8 * i, signed(spread))
        store_i64(chunks + 8 * i, chunk)
        prefetch(chunk + slot_bytes * home_of(spread, slot_bits))


@kernel
def fetch_known(header: int, n: int, slot_bits: int, count: int, mixed: int, chunks: int) -> None:
    """Asks for the tokens that n-grams will be compared with, see `fetch_slots`."""
    slot_bytes = 8 if load_i64(header + 8 * TIE) == LONGEST else 4
    tokens = load_i64(header + 8 * TOKENS)
    for i in range(count):
        slot = home_of(np.uint64(load_i64(mixed + 8 * i)), slot_bits)
        word = signed(load_u32(load_i64(chunks + 8 * i) + slot_bytes * slot))
        prefetch(tokens + 4 * ((word & END_MASK) - n))


@kernel
def lengthen(tokens: int, hash_: np.uint64, end: int, n: int, power: np.uint64) -> int:
    """Returns the polynomial of an n-gram with the token before it.

    Args:
        tokens: address of the tokens of the text.
        hash_: polynomial of the n-gram.
        end: where it ends, over n.
        n: its size.
        power: the base to the power of n + 1.
    """
    return signed(hash_ + np.uint64(load_u32(tokens + 4 * (end - n - 1))) * power)


@kernel
def enter_block(header: int, base: np.uint64, block: int, scratch: int) -> int:
    """Brings the index of a text on by up to `BLOCK` tokens, or ends it: a table has no slot.

    Size by size: what was met before goes on to the next one, and so does the first of its kind.

    Args:
        header: address of the text; every table has room, and so many tokens are not indexed.
        base: of the polynomial.
        block: how many tokens.
        scratch: address of `SCRATCH_WORDS` words.

    Returns:
        What that cost, in n-grams entered.
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    indexed = load_i64(header + 8 * INDEXED_LENGTH)
    tokens = load_i64(header + 8 * TOKENS)
    tie = load_i64(header + 8 * TIE)
    # Where n-grams of this size end, and their polynomials; those of the next size; and those that
    # were the first of a kind that has been met again: no other of that is in their table yet.
    ends, hashes = scratch, scratch + 8 * BLOCK
    next_ends, next_hashes = scratch + 16 * BLOCK, scratch + 24 * BLOCK
    first_ends, first_hashes = scratch + 32 * BLOCK, scratch + 40 * BLOCK
    mixed, chunks = scratch + 48 * BLOCK, scratch + 56 * BLOCK
    effort = scratch + 64 * BLOCK
    store_i64(effort, 0)

    # The last end of this size that comes to count.
    last = indexed + block - lag_of(min_ngram, disjoint)
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
            spread = np.uint64(load_i64(mixed + 8 * i))
            end = load_i64(first_ends + 8 * i)
            if not enter_new(load_i64(chunks + 8 * i), slot_bits, tie, spread, end, effort):
                return end_index(header, num_entered, effort)
        num_entered += num_first + count
        num_new, num_first, num_next = num_first, 0, 0

        fetch_slots(header, index, count, hashes, mixed, chunks)
        fetch_known(header, n, slot_bits, count, mixed, chunks)
        pending = table + 8 * (TABLE_WORDS + PENDING)
        if disjoint and n < max_ngram:
            if load_i64(pending) != 0:
                end = last - block
                store_i64(next_ends, end)
                store_i64(next_hashes, signed(hash_at(tokens, end, n + 1, base)))
                num_next = 1
            store_i64(pending, 0)
        for i in range(count):
            end = load_i64(ends + 8 * i)
            spread = np.uint64(load_i64(mixed + 8 * i))
            known = enter(load_i64(chunks + 8 * i), slot_bits, tie, tokens, spread, end, n, effort)
            if known == NO_SLOT:
                return end_index(header, num_entered, effort)
            if known == ENTERED:
                num_new += 1
            elif n < max_ngram:
                hash_ = np.uint64(load_i64(hashes + 8 * i))
                # One that begins the text has no larger one.
                if known > n:
                    store_i64(first_ends + 8 * num_first, known)
                    further = lengthen(tokens, hash_, known, n, power)
                    store_i64(first_hashes + 8 * num_first, further)
                    num_first += 1
                if disjoint and end == last:
                    store_i64(pending, 1)
                else:
                    store_i64(next_ends + 8 * num_next, end)
                    further = lengthen(tokens, hash_, end, n, power)
                    store_i64(next_hashes + 8 * num_next, further)
                    num_next += 1
        store_i64(table + 8 * ENTRIES, load_i64(table + 8 * ENTRIES) + num_new)
        if disjoint:
            last -= 1
        power *= base
        ends, next_ends = next_ends, ends
        hashes, next_hashes = next_hashes, hashes
        count = num_next
    store_i64(header + 8 * INDEXED_LENGTH, indexed + block)
    return num_entered + load_i64(effort) // PROBES_PER_ENTRY


@kernel
def end_index(header: int, num_entered: int, effort: int) -> int:
    """Says that a text is scanned from now on; returns what `enter_block` does."""
    store_i64(header + 8 * INDEXED, 0)
    return num_entered + load_i64(effort) // PROBES_PER_ENTRY


@kernel
def catch_up(header: int, base: np.uint64, budget: int, scratch: int) -> tuple[int, int]:
    """Enters what a text's index lacks, and returns (status, what that cost in n-grams entered).

    Args:
        header: address of the text.
        base: of the polynomial.
        budget: no block begins after that cost so much.
        scratch: address of `SCRATCH_WORDS` words.
    """
    spent = 0
    lacking = lacks(header)
    while lacking > 0:
        if spent >= budget:
            return BEHIND, spent
        room, fullest = room_for_block(header)
        if room == 0:
            return MUST_GROW + fullest, spent
        block = min(BLOCK, lacking, room)
        spent += enter_block(header, base, block, scratch)
        lacking = lacks(header)
    return DONE, spent
