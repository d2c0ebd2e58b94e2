"""Drafts from pools for many texts in one kernel call.

Owns when a pool is searched and when its draft replaces the sequence's own:

- With `TIE_EARLIEST` and `TIE_LATEST` the pool is searched if the sequence's own match is shorter
  than `pool_min_ngram`, or if there is none; with `TIE_LONGEST` always.
- Of the pool, the longest n-gram at the end of the context that some text contains and continues
  wins: its earliest or its latest occurrence in the order of feeding, or the longer match of both.
- The pool's draft replaces the sequence's own if its match is longer.
- `tokens_per_match` limits it like the sequence's own; it is never chained.
- A match does not extend past the beginning of a text, nor a draft past its end.
- A sequence does not draft from what it fed itself while it grows: its own last tokens would hide
  those of others.
"""

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from drafter.kernels.jit import kernel
from drafter.kernels.memory import as_pointer, load_i64
from drafter.ngram.index import DONE
from drafter.ngram.match import MAX_MATCH_LENGTH
from drafter.ngram.table import LENGTH, LONGEST, MAX_NGRAM, MIN_NGRAM, TIE, TOKENS, TOKENS_PER_MATCH
from drafter.pool_index.arena import Arena
from drafter.pool_index.link import own_tag_of, pool_block_of, pool_min_ngram_of
from drafter.pool_index.lookup import copy_from_pool, find_in_pool


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
            MAX_MATCH_LENGTH,
            own_tag_of(header),
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
