"""Drafts from a pool by its kernels, without a drafter."""

from collections.abc import Sequence

import numpy as np

from drafter.pool_index.arena import Arena
from drafter.pool_index.propose import copy_from_pool, find_in_pool


def draft_from_pool(
    arena: Arena,
    pool: int,
    context: Sequence[int],
    *,
    min_ngram: int,
    max_ngram: int,
    tie: int,
    max_draft_tokens: int,
) -> tuple[list[int], int] | None:
    """Returns (draft, match length), or None if nothing matches.

    Args:
        arena: the memory of all pools.
        pool: its block.
        context: the tokens to continue.
        min_ngram: the least tokens that must match.
        max_ngram: the most that are looked up.
        tie: which occurrence counts.
        max_draft_tokens: how long the draft may be.
    """
    buffer = np.array(context, dtype=np.uint32)
    position, match_length = find_in_pool(
        arena, pool, buffer, len(buffer), min_ngram, max_ngram, tie
    )
    if position == 0:
        return None
    draft = np.empty(max_draft_tokens, dtype=np.uint32)
    num_tokens = copy_from_pool(arena, pool, position, draft, max_draft_tokens)
    return draft[:num_tokens].tolist(), match_length
