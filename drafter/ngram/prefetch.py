"""Prefetches the memory that lookups are going to read. Kernels only.

The work on one text waits for memory in several dependent steps: header, tokens, directory, slot,
directories and slots of the larger sizes, tokens again. Texts are processed in groups, and each
step prefetches the next one's cache lines for the whole group, so that the waits overlap. The
addresses are guesses that change no result.
"""

import numpy as np
import numpy.typing as npt

from drafter.ngram.table import (
    ACCEPTED_DISTANCE,
    DRAFT_DISTANCE,
    INDEXED,
    LENGTH,
    MAX_NGRAM,
    MIN_NGRAM,
    REPEATED,
    SHAPE,
    SLOT_BYTES,
    TABLE_WORDS,
    TABLES,
    TAG_SHIFT,
    TOKENS,
    directory_entry,
    earliest_of,
    hash_at,
    home_of,
    latest_of,
    mix,
    slot_bits_of,
    tag_of,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64, prefetch


@kernel
def prefetch_header(header: int) -> None:
    """Prefetches a text's header: four tables and the beginning of their directories."""
    for line in range(0, TABLES + 4 * TABLE_WORDS + 8, 8):
        prefetch(header + 8 * line)


@kernel
def prefetch_end(header: int) -> None:
    """Prefetches the end of a text, and the places that a running copy may have reached."""
    tokens = load_i64(header + 8 * TOKENS)
    length = load_i64(header + 8 * LENGTH)
    prefetch(tokens + 4 * length - 4)
    prefetch(tokens + 4 * length - 68)
    for word in (DRAFT_DISTANCE, ACCEPTED_DISTANCE):
        place = tokens + 4 * (length - load_i64(header + 8 * word))
        prefetch(place - 32)
        prefetch(place + 28)


@kernel
def hash_end(header: int, n: int, base: np.uint64) -> np.uint64:
    """Returns the mixed hash of the last n tokens of a text, which has as many."""
    tokens = load_i64(header + 8 * TOKENS)
    return mix(hash_at(tokens, load_i64(header + 8 * LENGTH), n, base))


@kernel
def home_slot(header: int, n: int, mixed: np.uint64) -> int:
    """Returns the address of the slot at which the lookup of an n-gram begins."""
    table = header + 8 * (TABLES + TABLE_WORDS * (n - load_i64(header + 8 * MIN_NGRAM)))
    slot = home_of(mixed, slot_bits_of(load_i64(table + 8 * SHAPE)))
    return load_i64(directory_entry(table, mixed)) + SLOT_BYTES * slot


@kernel
def prefetch_directory(header: int, n: int, mixed: np.uint64) -> None:
    """Prefetches the directory's entry for the chunk that an n-gram belongs to."""
    table = header + 8 * (TABLES + TABLE_WORDS * (n - load_i64(header + 8 * MIN_NGRAM)))
    prefetch(directory_entry(table, mixed))


@kernel
def has_tag(slot: int, mixed: np.uint64) -> bool:
    """Whether the hash bits in a slot are those of an n-gram."""
    word = load_i64(slot)
    return word != 0 and word >> TAG_SHIFT == tag_of(mixed)


@kernel
def prefetch_source(header: int, slot: int) -> None:
    """Prefetches the tokens around a slot's ends: they are compared, and copied from."""
    tokens = load_i64(header + 8 * TOKENS)
    word = load_i64(slot)
    for end in (earliest_of(word), latest_of(word)):
        prefetch(tokens + 4 * end - 32)
        prefetch(tokens + 4 * end + 28)


@kernel
def prefetch_matches(
    headers: npt.NDArray[np.int64],
    is_looked_up: npt.NDArray[np.bool_],
    base: np.uint64,
    mixed: npt.NDArray[np.uint64],
    slots: npt.NDArray[np.int64],
) -> None:
    """Prefetches what the lookups at the ends of a group of texts are going to read.

    Args:
        headers: addresses of the texts, whose headers and ends are in the cache, [num_texts].
        is_looked_up: which of them are looked up, [>= num_texts].
        base: of the polynomial.
        mixed: scratch, [>= num_texts, 33].
        slots: scratch, [>= num_texts].
    """
    num_texts = len(headers)
    for t in range(num_texts):
        # The slot at which the lookup begins; 0: there is none.
        slots[t] = 0
        header = headers[t]
        if (
            is_looked_up[t]
            and load_i64(header + 8 * INDEXED) != 0
            and load_i64(header + 8 * LENGTH) > load_i64(header + 8 * MAX_NGRAM)
        ):
            slots[t] = 1
            min_ngram = load_i64(header + 8 * MIN_NGRAM)
            mixed[t, min_ngram] = hash_end(header, min_ngram, base)
            prefetch_directory(header, min_ngram, mixed[t, min_ngram])
    for t in range(num_texts):
        if slots[t] != 0:
            min_ngram = load_i64(headers[t] + 8 * MIN_NGRAM)
            slots[t] = home_slot(headers[t], min_ngram, mixed[t, min_ngram])
            prefetch(slots[t])
    # Most n-grams are in their first slots: others are not probed here.
    for t in range(num_texts):
        slot = slots[t]
        slots[t] = 0
        if slot == 0:
            continue
        header = headers[t]
        min_ngram = load_i64(header + 8 * MIN_NGRAM)
        if not has_tag(slot, mixed[t, min_ngram]):
            continue
        if load_i64(slot) & REPEATED == 0:
            prefetch_source(header, slot)
            continue
        slots[t] = slot
        for n in range(min_ngram + 1, load_i64(header + 8 * MAX_NGRAM) + 1):
            mixed[t, n] = hash_end(header, n, base)
            prefetch_directory(header, n, mixed[t, n])
    for t in range(num_texts):
        if slots[t] != 0:
            header = headers[t]
            min_ngram = load_i64(header + 8 * MIN_NGRAM)
            for n in range(min_ngram + 1, load_i64(header + 8 * MAX_NGRAM) + 1):
                prefetch(home_slot(header, n, mixed[t, n]))
    for t in range(num_texts):
        if slots[t] != 0:
            header = headers[t]
            min_ngram = load_i64(header + 8 * MIN_NGRAM)
            for n in range(min_ngram + 1, load_i64(header + 8 * MAX_NGRAM) + 1):
                slot = home_slot(header, n, mixed[t, n])
                if not has_tag(slot, mixed[t, n]):
                    break
                slots[t] = slot
            prefetch_source(header, slots[t])
