"""The kernel of top-k and top-p. One program a row; nothing is sorted.

Both keep the tokens, from the likeliest on and of equals from the lowest id on, while the mass
before a token is below a limit: top-k counts 1 for each token, top-p its weight. The last value
kept is searched by bisection over the bits of the distances from the largest logit. An end of the
interval is always the distance of some token, so the search ends when few tokens are between.
"""

import triton.language as tl

from verifier.gpu.sampling.kernels.jit import (
    NUM_INTEGERS,
    NUM_NUMBERS,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    jit,
)
from verifier.gpu.sampling.kernels.rows import INFINITY, has_distribution, largest_of

_BITS_OF_INFINITY = tl.constexpr(0x7FF0000000000000)


@jit
def cut_rows(
    first_row,
    row_sequences,
    steps,
    integers,
    numbers,
    tops,
    scaled,
    weights,
    sums,
    VOCAB_SIZE: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives dropped tokens the weight 0, and -inf in `scaled`; corrects the sums [R, N]."""
    chunk_row = tl.program_id(0).to(tl.int64)
    row = first_row + chunk_row
    slot = tl.load(steps + tl.load(row_sequences + row) * STEP_WIDTH + SLOT)
    temperature = tl.load(numbers + slot * NUM_NUMBERS + TEMPERATURE)
    top_p = tl.load(numbers + slot * NUM_NUMBERS + TOP_P)
    top_k = tl.load(integers + slot * NUM_INTEGERS + TOP_K)
    has_top_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    top = largest_of(tops, row, NUM_BLOCKS, PADDED)
    if has_distribution(temperature, top) & (has_top_k | (top_p < 1.0)):
        scaled += chunk_row * VOCAB_SIZE
        weights += chunk_row * VOCAB_SIZE
        blocks = tl.arange(0, PADDED)
        places = sums + row * NUM_BLOCKS + blocks
        total = tl.sum(tl.load(places, mask=blocks < NUM_BLOCKS, other=0.0), axis=0)
        if has_top_k:
            total = _keep_first(scaled, weights, top_k.to(tl.float64), True, VOCAB_SIZE, BLOCK)
        if top_p < 1.0:
            total = _keep_first(scaled, weights, top_p * total, False, VOCAB_SIZE, BLOCK)
        tl.store(places, tl.where(blocks == 0, total, 0.0), mask=blocks < NUM_BLOCKS)


@jit
def _keep_first(
    scaled,
    weights,
    limit,
    COUNTS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Drops the tokens before which the mass is `limit` or more. Returns the sum of the weights
    that are left.

    Args:
        scaled, weights: [V] of one row; the largest of `scaled` is 0.
        COUNTS: a token's mass is 1, not its weight.
    """
    offsets = tl.arange(0, BLOCK)
    # The first one is kept whatever the limit.
    limit = tl.where(limit > 0.0, limit, 1e-300)
    nearest = tl.sum(tl.zeros([BLOCK], tl.int64), axis=0)
    farthest = nearest
    for start in range(0, VOCAB_SIZE, BLOCK):
        distances, _ = _distances(scaled, weights, start + offsets, COUNTS, VOCAB_SIZE)
        possible = tl.where(distances < _BITS_OF_INFINITY, distances, 0)
        farthest = tl.maximum(farthest, tl.max(possible, axis=0))
    # The distance of the last token kept is one of a token, in [nearest, farthest].
    while nearest < farthest:
        middle = nearest + (farthest - nearest) // 2
        mass, before, after = limit * 0.0, nearest, farthest
        for start in range(0, VOCAB_SIZE, BLOCK):
            distances, masses = _distances(scaled, weights, start + offsets, COUNTS, VOCAB_SIZE)
            is_within = distances <= middle
            mass += tl.sum(tl.where(is_within, masses, 0.0), axis=0)
            before = tl.maximum(before, tl.max(tl.where(is_within, distances, 0), axis=0))
            beyond = tl.where(is_within, _BITS_OF_INFINITY, distances)
            after = tl.minimum(after, tl.min(beyond, axis=0))
        nearest = tl.where(mass >= limit, nearest, after)
        farthest = tl.where(mass >= limit, before, farthest)

    mass = limit * 0.0
    for start in range(0, VOCAB_SIZE, BLOCK):
        distances, masses = _distances(scaled, weights, start + offsets, COUNTS, VOCAB_SIZE)
        mass += tl.sum(tl.where(distances < farthest, masses, 0.0), axis=0)
    total, num_equal = limit * 0.0, (nearest * 0).to(tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token_ids = start + offsets
        is_token = token_ids < VOCAB_SIZE
        distances, masses = _distances(scaled, weights, token_ids, COUNTS, VOCAB_SIZE)
        is_equal = distances == farthest
        ranks = num_equal + tl.cumsum(is_equal.to(tl.int32), axis=0) - 1
        is_before = mass + ranks.to(tl.float64) * masses < limit
        is_kept = (distances < farthest) | (is_equal & is_before)
        num_equal += tl.sum(is_equal.to(tl.int32), axis=0)
        weight = tl.load(weights + token_ids, mask=is_token & is_kept, other=0.0)
        total += tl.sum(weight, axis=0)
        tl.store(weights + token_ids, weight, mask=is_token)
        tl.store(scaled + token_ids, -INFINITY, mask=is_token & (is_kept == 0))
    # What is written here is read again by other threads.
    tl.debug_barrier()
    return total


@jit
def _distances(scaled, weights, token_ids, COUNTS: tl.constexpr, VOCAB_SIZE: tl.constexpr):
    """The bits of the distances from 0 of `scaled`, which are in the distances' order, and the
    masses, of tokens; infinite and 0 outside the vocabulary.
    """
    is_token = token_ids < VOCAB_SIZE
    values = tl.abs(tl.load(scaled + token_ids, mask=is_token, other=-INFINITY))
    distances = values.to(tl.int64, bitcast=True)
    if COUNTS:
        masses = tl.where(distances < _BITS_OF_INFINITY, 1.0, 0.0).to(tl.float64)
    else:
        masses = tl.load(weights + token_ids, mask=is_token, other=0.0)
    return distances, masses
