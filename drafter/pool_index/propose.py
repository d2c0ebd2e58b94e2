"""Drafts from pools for many texts in one kernel call.

Owns when a pool is searched and when its draft replaces the sequence's own:

- With `TIE_EARLIEST` and `TIE_LATEST` the pool is searched if the sequence's own match is shorter
  than `pool_min_ngram`, or if there is none; with `TIE_LONGEST` always.
- Of the pool, the longest n-gram at the end of the context that some text contains and continues
  wins: its earliest or its latest occurrence in the order of feeding, or the longer match of both.
- The pool's draft replaces the sequence's own if its match is longer.
- `tokens_per_match` limits it like the sequence's own.
- A match does not extend past the beginning of a text, nor a draft past its end.
"""

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from drafter.ngram.draft import MAX_MATCH_LENGTH
from drafter.ngram.index import DONE
from drafter.ngram.table import (
    EARLIEST,
    LENGTH,
    LONGEST,
    MAX_NGRAM,
    MIN_NGRAM,
    TIE,
    TOKENS,
    TOKENS_PER_MATCH,
)
from drafter.pool_index.arena import BLOCK_BITS, TAIL, Arena, word
from drafter.pool_index.link import pool_block_of, pool_min_ngram_of
from drafter.pool_index.table import (
    extend_hash,
    first_slot,
    key_of,
    next_slot,
    page_of,
    seed_of,
    slot_after,
)
from drafter.pool_index.tokens import (
    begins_at,
    position_after,
    position_before,
)
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import as_pointer, load_i64


@kernel
def propose_from_pools(
    arena: Arena,
    headers: npt.NDArray[np.int64],
    rooms: npt.NDArray[np.int64],
    statuses: npt.NDArray[np.int64],
    draft_starts: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.uint32],
    draft_lengths: npt.NDArray[np.int64],
    match_lengths: npt.NDArray[np.int64],
    is_from_pool: npt.NDArray[np.bool_],
) -> None:
    """Replaces a text's own draft by its pool's where the rules above say so.

    Args:
        arena: all pools.
        headers: addresses of the texts, with links of the arena's generation, [num_texts].
        rooms: how long each draft may be, [num_texts].
        statuses: those that are not `DONE` are skipped, [num_texts].
        draft_starts: where in `drafts` each draft lies, [num_texts].
        drafts: the drafts, each with all of its room.
        draft_lengths: their lengths; 0: nothing matched, [num_texts].
        match_lengths: the lengths of their matches, [num_texts].
        is_from_pool: receives whether the draft is the pool's, [num_texts].
    """
    for t in range(len(headers)):
        is_from_pool[t] = False
        header = headers[t]
        pool = pool_block_of(header)
        if pool == 0 or rooms[t] == 0 or statuses[t] != DONE:
            continue
        tie = load_i64(header + 8 * TIE)
        own_length = match_lengths[t] if draft_lengths[t] > 0 else 0
        if own_length > 0 and own_length >= pool_min_ngram_of(header) and tie != LONGEST:
            continue
        length = load_i64(header + 8 * LENGTH)
        text = carray(as_pointer(load_i64(header + 8 * TOKENS)), (length,), np.uint32)
        position, match_length = find_in_pool(
            arena,
            pool,
            text,
            length,
            load_i64(header + 8 * MIN_NGRAM),
            load_i64(header + 8 * MAX_NGRAM),
            tie,
        )
        if position == 0 or match_length <= own_length:
            continue
        room = rooms[t]
        tokens_per_match = load_i64(header + 8 * TOKENS_PER_MATCH)
        if tie == LONGEST and tokens_per_match > 0:
            room = min(room, tokens_per_match * match_length)
        start = draft_starts[t]
        draft_lengths[t] = copy_from_pool(arena, pool, position, drafts[start : start + room], room)
        match_lengths[t] = match_length
        is_from_pool[t] = True


@kernel
def _measure_match(
    arena: Arena, position: int, buffer: npt.NDArray[np.uint32], num_tokens: int, max_length: int
) -> int:
    """How many tokens before the position, in its text, equal the end of the context."""
    max_length = min(max_length, num_tokens)
    count = 0
    while count < max_length and not begins_at(arena, position):
        position = position_before(arena, position)
        if arena[position] != buffer[num_tokens - 1 - count]:
            break
        count += 1
    return count


@kernel
def find_in_pool(
    arena: Arena,
    pool: int,
    buffer: npt.NDArray[np.uint32],
    num_tokens: int,
    min_ngram: int,
    max_ngram: int,
    tie: int,
) -> tuple[int, int]:
    """Finds the place in a pool's texts that a context may be continued from.

    If an n-gram is not there, no longer one is, so the sizes are tried from the shortest on: a
    context that does not occur in the pool costs one lookup.

    Args:
        arena, pool: the pool, whose index must cover the sizes.
        buffer, num_tokens: the context is its first `num_tokens` tokens, [capacity] uint32.
        min_ngram: shortest n-gram that counts.
        max_ngram: longest that is looked up; the longest that is found wins.
        tie: EARLIEST or LATEST occurrence, or LONGEST: the longer match of the two, the latest if
            they are equal.

    Returns:
        (position of the draft's first token, length of the match); (0, 0): nothing matches.
    """
    earliest, latest = 0, 0
    ngram_hash = seed_of(arena)
    for n in range(1, min(max_ngram, num_tokens) + 1):
        ngram_hash = extend_hash(ngram_hash, buffer[num_tokens - n])
        if n < min_ngram:
            continue
        key = key_of(arena, ngram_hash, n)
        page = page_of(arena, pool, key)
        at = next_slot(arena, page, first_slot(key), key)
        while arena[at + 2] != 0:
            if _measure_match(arena, word(arena, at + 2), buffer, num_tokens, n) == n:
                break
            at = next_slot(arena, page, slot_after(page, at), key)
        if arena[at + 2] == 0:
            break
        earliest, latest = word(arena, at + 1), word(arena, at + 2)
    if latest == 0:
        return 0, 0
    position = earliest if tie == EARLIEST else latest
    match_length = _measure_match(arena, position, buffer, num_tokens, MAX_MATCH_LENGTH)
    if tie == LONGEST and earliest != latest:
        length_of_earliest = _measure_match(arena, earliest, buffer, num_tokens, MAX_MATCH_LENGTH)
        if length_of_earliest > match_length:
            return earliest, length_of_earliest
    return position, match_length


@kernel
def copy_from_pool(
    arena: Arena, pool: int, position: int, out: npt.NDArray[np.uint32], max_tokens: int
) -> int:
    """Copies tokens from a position on, up to the end of their text.

    Returns:
        How many.
    """
    tail = word(arena, (pool << BLOCK_BITS) + TAIL)
    count = 0
    while count < max_tokens:
        out[count] = arena[position]
        count += 1
        position = position_after(arena, position)
        if position == tail or begins_at(arena, position):
            break
    return count
