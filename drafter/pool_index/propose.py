"""Proposes from pools for many texts in one kernel call.

Owns when a pool is looked into and when its draft wins over the sequence's own:

- With `TIE_EARLIEST` and `TIE_LATEST` the pool is looked into when the sequence's own match is
  shorter than `pool_min_ngram`, or when there is none; with `TIE_LONGEST` always.
- In the pool, the longest n-gram at the end of the context that occurs in a kept text, and is
  continued there, wins: its earliest or its latest occurrence in the order of feeding, or the one
  of both with the longer match.
- The pool's draft wins if its match is longer than the sequence's own.
- `tokens_per_match` bounds it as it bounds the sequence's own; it is never chained.
- A match ends where a kept text begins, and a draft where it ends.
- What a sequence feeds while it grows is no occurrence for itself: its own last tokens would hide
  what others have.
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
    """Puts the pool's draft in the place of a text's own where the law says so.

    Args:
        arena: all pools.
        headers: addresses of the texts, whose links are of the arena's generation, [num_texts].
        rooms: how long each draft may be, [num_texts].
        statuses: only what is `DONE` is looked at, [num_texts].
        draft_starts: where in `drafts` each draft lies, [num_texts].
        drafts: the drafts, with room for as many tokens as each may have.
        draft_lengths: their lengths; 0: nothing matched, [num_texts].
        match_lengths: how many tokens agree before their sources, [num_texts].
        is_from_pool: takes whether the draft is the pool's, [num_texts].
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
        position, reach = find_in_pool(
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
        if position == 0 or reach <= own_length:
            continue
        most = rooms[t]
        tokens_per_match = load_i64(header + 8 * TOKENS_PER_MATCH)
        if tie == LONGEST and tokens_per_match > 0:
            most = min(most, tokens_per_match * reach)
        start = draft_starts[t]
        draft_lengths[t] = copy_from_pool(arena, pool, position, drafts[start : start + most], most)
        match_lengths[t] = reach
        is_from_pool[t] = True
