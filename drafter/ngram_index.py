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
"""

import numpy as np
import numpy.typing as npt

from drafter.jit import kernel
from drafter.kernel_memory import load_i64, load_u32, prefetch, signed, store_i64
from drafter.ngram_table import (
    DIRECTORY,
    DISJOINT,
    END_MASK,
    ENTRIES,
    INDEXED,
    INDEXED_LENGTH,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    PENDING,
    SHAPE,
    TABLE_WORDS,
    TABLES,
    TIE,
    TOKENS,
    chunk_number,
    enter,
    hash_at,
    home_of,
    mix,
    room_in,
    slot_bits_of,
)

DONE, BEHIND, MUST_GROW = range(3)
"""What became of a text: all is entered; the budget ran out; its table `status - MUST_GROW` must
grow first."""

BLOCK = 16
"""Ends that are entered together: their slots are fetched before the first is looked at."""

MOST_ENTERED = 2 * BLOCK
"""N-grams of one size that a block brings: its own ends, and first ones of those met again."""


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
def enter_all(
    header: int,
    index: int,
    base: np.uint64,
    count: int,
    ends: npt.NDArray[np.int64],
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
) -> None:
    """Enters n-grams of one size.

    Args:
        header: address of the text.
        index: of the table, in which there is room for all.
        base: of the polynomial.
        count: how many.
        ends: where they end, [MOST_ENTERED]; takes what became of each, see `enter`.
        mixed: scratch, [MOST_ENTERED].
        chunks: scratch, [MOST_ENTERED].
    """
    n = load_i64(header + 8 * MIN_NGRAM) + index
    table = header + 8 * (TABLES + TABLE_WORDS * index)
    tokens = load_i64(header + 8 * TOKENS)
    tie = load_i64(header + 8 * TIE)
    slot_bytes = 8 if tie == LONGEST else 4
    shape = load_i64(table + 8 * SHAPE)
    slot_bits = slot_bits_of(shape)
    directory = load_i64(table + 8 * DIRECTORY)
    for i in range(count):
        spread = mix(hash_at(tokens, ends[i], n, base))
        mixed[i] = spread
        chunks[i] = load_i64(directory + 8 * chunk_number(shape, spread))
        prefetch(chunks[i] + slot_bytes * home_of(spread, slot_bits))
    for i in range(count):
        known = signed(load_u32(chunks[i] + slot_bytes * home_of(mixed[i], slot_bits))) & END_MASK
        prefetch(tokens + 4 * (known - n))
    entries = load_i64(table + 8 * ENTRIES)
    for i in range(count):
        ends[i] = enter(chunks[i], slot_bits, tie, tokens, mixed[i], ends[i], n)
        entries += ends[i] == 0
    store_i64(table + 8 * ENTRIES, entries)


@kernel
def enter_block(
    header: int,
    base: np.uint64,
    block: int,
    ends: npt.NDArray[np.int64],
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
) -> int:
    """Brings the index of a text on by up to `BLOCK` tokens; returns how many n-grams it entered.

    Args:
        header: address of the text; every table has room, and so many tokens are not indexed.
        base: of the polynomial.
        block: how many tokens.
        ends: scratch, [MOST_ENTERED].
        mixed: scratch, [MOST_ENTERED].
        chunks: scratch, [MOST_ENTERED].
    """
    min_ngram = load_i64(header + 8 * MIN_NGRAM)
    max_ngram = load_i64(header + 8 * MAX_NGRAM)
    disjoint = load_i64(header + 8 * DISJOINT) != 0
    indexed = load_i64(header + 8 * INDEXED_LENGTH)
    num_entered = 0
    # Bit i: the i-th end of this block is to be entered.
    marks = (1 << block) - 1
    # First ends of n-grams that this block has met again: they come first in `ends`.
    num_first = 0
    for n in range(min_ngram, max_ngram + 1):
        index = n - min_ngram
        table = header + 8 * (TABLES + TABLE_WORDS * index)
        first_end = indexed + 1 - lag_of(n, disjoint)
        if index > 0 and disjoint:
            marks = marks << 1 | load_i64(table + 8 * PENDING)
            store_i64(table + 8 * PENDING, marks >> block)
        count = num_first
        for i in range(max(0, n - first_end), block):
            ends[count] = first_end + i
            count += marks >> i & 1
        if count == 0:
            marks = 0
            continue
        enter_all(header, index, base, count, ends, mixed, chunks)
        num_entered += count
        at = num_first
        num_first = 0
        met = 0
        for i in range(max(0, n - first_end), block):
            if marks >> i & 1:
                known = ends[at]
                at += 1
                if known != 0:
                    met |= 1 << i
                # One that begins the text has no larger one.
                if known > n:
                    ends[num_first] = known
                    num_first += 1
        marks = met
    store_i64(header + 8 * INDEXED_LENGTH, indexed + block)
    return num_entered


@kernel
def catch_up(
    header: int,
    base: np.uint64,
    budget: int,
    ends: npt.NDArray[np.int64],
    mixed: npt.NDArray[np.uint64],
    chunks: npt.NDArray[np.int64],
) -> tuple[int, int]:
    """Enters what a text's index lacks, and returns (status, how many n-grams were entered)."""
    spent = 0
    lacking = lacks(header)
    while lacking > 0:
        if spent >= budget:
            return BEHIND, spent
        room, fullest = room_for_block(header)
        if room == 0:
            return MUST_GROW + fullest, spent
        block = min(BLOCK, lacking, room)
        spent += enter_block(header, base, block, ends, mixed, chunks)
        lacking -= block
    return DONE, spent
