"""The kernels before the cut: from logits to adjusted logits, and to weights.

Shape legend: R rows of a step, of which n are computed at a time; V vocabulary, in N blocks. A
program computes one block of one row; what later kernels need of the row is kept by block.
"""

import triton.language as tl

from verifier.gpu.sampling.kernels.jit import (
    COUNTS_TOKENS,
    DRAFTS,
    FIRST_ROW,
    FREQUENCY,
    LOG_MIN_P,
    MASK_ROW,
    NUM_BIASES,
    NUM_INTEGERS,
    NUM_MASKED,
    NUM_NUMBERS,
    NUM_STOPS,
    PRESENCE,
    REPETITION,
    SLOT,
    TEMPERATURE,
    jit,
)
from verifier.gpu.sampling.kernels.noise import exponential

INFINITY = tl.constexpr(float("inf"))


@jit
def largest_of(block_values, row, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The largest of a row's blocks [N]."""
    blocks = tl.arange(0, PADDED)
    pointers = block_values + row * NUM_BLOCKS + blocks
    return tl.max(tl.load(pointers, mask=blocks < NUM_BLOCKS, other=-INFINITY), axis=0)


@jit
def has_distribution(temperature, top):
    """False: the row gives its likeliest token. Where all tokens are masked there is no other."""
    return (temperature != 0.0) & (top > -INFINITY) & (top < INFINITY)


@jit
def adjust_rows(
    logits,
    row_stride,
    first_row,
    row_sequences,
    steps,
    integers,
    numbers,
    token_counts,
    bias_token_ids,
    biases,
    stop_token_ids,
    allowed,
    raw_tops,
    tops,
    top_token_ids,
    adjusted,
    VOCAB_SIZE: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_STOPS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalties, bias and masks, as `verifier/sampling/adjustments.py` has them.

    Args:
        logits: [R, V], rows `row_stride` apart. token_counts: [slots, V] of `TokenCounts`.
        allowed: [masks, ceil(V / 32)] int32.
        raw_tops: [R, N] float64, written: the largest logit, inf if there is a NaN.
        tops, top_token_ids: [R, N], written: the largest adjusted logit, and the first token of it.
        adjusted: [n, V] float64, written where the temperature is not 0.
    """
    chunk_row = tl.program_id(0).to(tl.int64)
    row = first_row + chunk_row
    block = tl.program_id(1)
    start = block * BLOCK
    token_ids = start + tl.arange(0, BLOCK)
    is_token = token_ids < VOCAB_SIZE
    step = steps + tl.load(row_sequences + row) * STEP_WIDTH
    slot = tl.load(step + SLOT)
    index = row - tl.load(step + FIRST_ROW)
    integers += slot * NUM_INTEGERS
    numbers += slot * NUM_NUMBERS
    loaded = tl.load(logits + row * row_stride + token_ids, mask=is_token, other=-INFINITY)
    values = loaded.to(tl.float64)
    is_number = values == values
    raw_top = tl.max(tl.where(is_number, values, INFINITY), axis=0)

    if tl.load(integers + COUNTS_TOKENS) != 0:
        pointers = token_counts + slot * VOCAB_SIZE + token_ids
        counted = tl.load(pointers, mask=is_token, other=0)
        for place in range(index):
            draft = tl.load(step + DRAFTS + place)
            counted += tl.where(token_ids == draft, 2, 0)
        counts = (counted >> 1).to(tl.float64)
        penalty = tl.load(numbers + REPETITION)
        frequency = tl.load(numbers + FREQUENCY)
        presence = tl.load(numbers + PRESENCE)
        if penalty != 1.0:
            penalized = tl.where(values > 0, values / penalty, values * penalty)
            values = tl.where(counted != 0, penalized, values)
        values = tl.where(counted > 1, values - frequency * counts - presence, values)
    for place in range(tl.load(integers + NUM_BIASES)):
        token_id = tl.load(bias_token_ids + slot * MAX_BIASES + place)
        if (token_id >= start) & (token_id < start + BLOCK):
            bias = tl.load(biases + slot * MAX_BIASES + place)
            values = tl.where(token_ids == token_id, values + bias, values)
    if index < tl.load(step + NUM_MASKED):
        for place in range(tl.load(integers + NUM_STOPS)):
            token_id = tl.load(stop_token_ids + slot * MAX_STOPS + place)
            if (token_id >= start) & (token_id < start + BLOCK):
                values = tl.where(token_ids == token_id, -INFINITY, values)
    mask_row = tl.load(step + MASK_ROW)
    if mask_row >= 0:
        pointers = allowed + (mask_row + index) * ((VOCAB_SIZE + 31) // 32) + (token_ids >> 5)
        words = tl.load(pointers, mask=is_token, other=0)
        values = tl.where(((words >> (token_ids & 31)) & 1) != 0, values, -INFINITY)

    values = tl.where(is_token, values, -INFINITY)
    # A row with a NaN is not used; the largest must be found all the same.
    ordered = tl.where(is_number, values, -INFINITY)
    top = tl.max(ordered, axis=0)
    out = row * NUM_BLOCKS + block
    tl.store(raw_tops + out, raw_top)
    tl.store(tops + out, top)
    tl.store(top_token_ids + out, tl.min(tl.where(ordered == top, token_ids, VOCAB_SIZE), axis=0))
    if tl.load(numbers + TEMPERATURE) != 0.0:
        tl.store(adjusted + chunk_row * VOCAB_SIZE + token_ids, values, mask=is_token)


@jit
def weigh_rows(
    first_row,
    row_sequences,
    steps,
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
    """Temperature, min-p and exponential, of rows that have a distribution.

    Args:
        scaled: [n, V], overwritten: adjusted logits; then less the largest and over the
            temperature, -inf for tokens that min-p drops. weights: [n, V], written: exp of them.
        sums: [R, N], written: of the weights.
    """
    chunk_row = tl.program_id(0).to(tl.int64)
    row = first_row + chunk_row
    block = tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token_ids < VOCAB_SIZE
    slot = tl.load(steps + tl.load(row_sequences + row) * STEP_WIDTH + SLOT)
    numbers += slot * NUM_NUMBERS
    temperature = tl.load(numbers + TEMPERATURE)
    top = largest_of(tops, row, NUM_BLOCKS, PADDED)
    if has_distribution(temperature, top):
        places = chunk_row * VOCAB_SIZE + token_ids
        # Subtracting the largest first keeps a tiny temperature from overflowing.
        values = tl.load(scaled + places, mask=is_token, other=-INFINITY)
        values = (values - top) / temperature
        values = tl.where(values >= tl.load(numbers + LOG_MIN_P), values, -INFINITY)
        weight = exponential(values)
        tl.store(scaled + places, values, mask=is_token)
        tl.store(weights + places, weight, mask=is_token)
        tl.store(sums + row * NUM_BLOCKS + block, tl.sum(weight, axis=0))
