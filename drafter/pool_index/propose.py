"""One kernel call for a whole batch: every text that has a pool may get its draft from there.

Owns the law of when a pool is looked into and when its draft is taken; see `pool_drafts.py` for its
words. Comes after `proposal_kernel.py`, whose answers it changes in place.
"""

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from drafter.kernels.jit import kernel
from drafter.kernels.memory import as_pointer, load_i64
from drafter.ngram.index import DONE
from drafter.ngram.match import MAX_REACH_TOKENS
from drafter.ngram.table import LENGTH, LONGEST, MAX_NGRAM, MIN_NGRAM, TIE, TOKENS, TOKENS_PER_MATCH
from drafter.pool_index.arena import Arena
from drafter.pool_index.link import own_tag_of, pool_block_of, pool_min_ngram_of
from drafter.pool_index.lookup import copy_from_pool, find_in_pool


@kernel
def draft_from_pools(
    arena: Arena,
    headers: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int64],
    statuses: npt.NDArray[np.int64],
    draft_starts: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.uint32],
    draft_lengths: npt.NDArray[np.int64],
    reaches: npt.NDArray[np.int64],
    is_from_pool: npt.NDArray[np.bool_],
) -> None:
    """Puts the pool's draft in the place of a text's own where the law says so.

    Args:
        arena: all pools.
        headers: addresses of the texts, whose links are of the arena's generation, [num_texts].
        wanted: most tokens of each draft, [num_texts].
        statuses: only what is `DONE` is looked at, [num_texts].
        draft_starts: where in `drafts` each draft lies, [num_texts].
        drafts: the drafts, with room for as many tokens as are wanted of each.
        draft_lengths: their lengths, 0: nothing matched, [num_texts].
        reaches: how far back the matches reach, [num_texts].
        is_from_pool: takes whether the draft is the pool's, [num_texts].
    """
    for t in range(len(headers)):
        is_from_pool[t] = False
        header = headers[t]
        pool = pool_block_of(header)
        if pool == 0 or wanted[t] == 0 or statuses[t] != DONE:
            continue
        tie = load_i64(header + 8 * TIE)
        own_reach = reaches[t] if draft_lengths[t] > 0 else 0
        if own_reach > 0 and own_reach >= pool_min_ngram_of(header) and tie != LONGEST:
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
            MAX_REACH_TOKENS,
            own_tag_of(header),
        )
        if position == 0 or reach <= own_reach:
            continue
        most = wanted[t]
        tokens_per_match = load_i64(header + 8 * TOKENS_PER_MATCH)
        if tie == LONGEST and tokens_per_match > 0:
            most = min(most, tokens_per_match * reach)
        start = draft_starts[t]
        draft_lengths[t] = copy_from_pool(arena, pool, position, drafts[start : start + most], most)
        reaches[t] = reach
        is_from_pool[t] = True
