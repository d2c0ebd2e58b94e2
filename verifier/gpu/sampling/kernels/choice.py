"""The kernels after the cut: one token per row, and the verdict on each sequence.

Shape legend as in `rows.py`; B sequences, K the most drafts of one.
"""

import triton.language as tl

from verifier.gpu.sampling.kernels.jit import (
    DRAFTS,
    FIRST_ROW,
    NUM_DRAFTS,
    NUM_INTEGERS,
    NUM_NUMBERS,
    POSITION,
    SEED,
    SLOT,
    TEMPERATURE,
    jit,
)
from verifier.gpu.sampling.kernels.noise import uniform
from verifier.gpu.sampling.kernels.rows import INFINITY, has_distribution, largest_of


@jit
def _probabilities(weights, total):
    """As float32 has them."""
    return (weights / total).to(tl.float32).to(tl.float64)


@jit
def _total(sums, row, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    blocks = tl.arange(0, PADDED)
    pointers = sums + row * NUM_BLOCKS + blocks
    return tl.sum(tl.load(pointers, mask=blocks < NUM_BLOCKS, other=0.0), axis=0)


@jit
def race_rows(
    first_row,
    row_sequences,
    steps,
    integers,
    numbers,
    tops,
    weights,
    sums,
    scores,
    token_ids_chosen,
    VOCAB_SIZE: tl.constexpr,
    STEP_WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The winner of each block, by probability over exponential noise.

    Args:
        scores, token_ids_chosen: [R, N], written; -1: no token of the block can win.
    """
    chunk_row = tl.program_id(0).to(tl.int64)
    row = first_row + chunk_row
    block = tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token_ids < VOCAB_SIZE
    step = steps + tl.load(row_sequences + row) * STEP_WIDTH
    slot = tl.load(step + SLOT)
    temperature = tl.load(numbers + slot * NUM_NUMBERS + TEMPERATURE)
    top = largest_of(tops, row, NUM_BLOCKS, PADDED)
    if has_distribution(temperature, top):
        total = _total(sums, row, NUM_BLOCKS, PADDED)
        places = weights + chunk_row * VOCAB_SIZE + token_ids
        probs = _probabilities(tl.load(places, mask=is_token, other=0.0), total)
        seed = tl.load(integers + slot * NUM_INTEGERS + SEED)
        position = tl.load(step + POSITION) + row - tl.load(step + FIRST_ROW)
        noise = -tl.log(uniform(token_ids, position, seed))
        own = tl.where(probs > 0.0, probs / noise, -1.0)
        best = tl.max(own, axis=0)
        winner = tl.min(tl.where(own == best, token_ids, VOCAB_SIZE), axis=0)
        tl.store(scores + row * NUM_BLOCKS + block, best)
        tl.store(token_ids_chosen + row * NUM_BLOCKS + block, winner)


@jit
def decide(
    steps,
    numbers,
    is_usable,
    raw_tops,
    tops,
    top_token_ids,
    scores,
    token_ids_chosen,
    verdicts,
    STEP_WIDTH: tl.constexpr,
    VERDICT_WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Keeps each sequence's tokens up to and including the first that differs from its draft, and
    before the first row that is not usable. One program a sequence.

    Args:
        is_usable: [R] int8.
        verdicts: [B, K + 3] int64, written: the tokens, then -1; how many drafts are accepted;
            whether the row after them is usable.
    """
    sequence = tl.program_id(0).to(tl.int64)
    step = steps + sequence * STEP_WIDTH
    first_row = tl.load(step + FIRST_ROW)
    num_drafts = tl.load(step + NUM_DRAFTS)
    temperature = tl.load(numbers + tl.load(step + SLOT) * NUM_NUMBERS + TEMPERATURE)
    blocks = tl.arange(0, PADDED)
    is_block = blocks < NUM_BLOCKS
    columns = tl.arange(0, PADDED_WIDTH)
    verdict = tl.full([PADDED_WIDTH], -1, tl.int64)
    index, is_finite, is_open = num_drafts * 0, num_drafts * 0, num_drafts * 0 + 1
    while is_open != 0:
        row = first_row + index
        places = row * NUM_BLOCKS + blocks
        raw_top = largest_of(raw_tops, row, NUM_BLOCKS, PADDED)
        usable = tl.load(is_usable + row) != 0
        is_finite = (usable & (raw_top > -INFINITY) & (raw_top < INFINITY)).to(tl.int64)
        own = tl.load(tops + places, mask=is_block, other=-INFINITY)
        ids = tl.load(top_token_ids + places, mask=is_block, other=0)
        top = tl.max(own, axis=0)
        if has_distribution(temperature, top):
            own = tl.load(scores + places, mask=is_block, other=-2.0)
            ids = tl.load(token_ids_chosen + places, mask=is_block, other=0)
        # The first block of equals has the lowest ids.
        first = tl.min(tl.where(own == tl.max(own, axis=0), blocks, PADDED), axis=0)
        token_id = tl.sum(tl.where(blocks == first, ids, 0), axis=0).to(tl.int64)
        draft = tl.load(step + DRAFTS + index, mask=index < num_drafts, other=-1)
        verdict = tl.where((columns == index) & (is_finite != 0), token_id, verdict)
        is_open = is_finite * ((token_id == draft) & (index < num_drafts)).to(tl.int64)
        index += is_open
    verdict = tl.where(columns == VERDICT_WIDTH - 2, index, verdict)
    verdict = tl.where(columns == VERDICT_WIDTH - 1, is_finite, verdict)
    places = verdicts + sequence * VERDICT_WIDTH + columns
    tl.store(places, verdict, mask=columns < VERDICT_WIDTH)
