"""Attention over the paged K/V cache, read in place through block tables.

A block holds 16 tokens of a layer: for each K/V head the keys [head_dim, 16], then for each K/V
head the values [head_dim / 16, 16 tokens, 16]. So keys are packed weights of a product whose
outputs are scores, and values are packed weights of one whose inputs are probabilities: both are
computed by the tiles of every other product.

A query's result depends on nothing but its own position and what it sees: scores are chains over
head_dim, the sum of exponentials is 16 chains over positions (by position modulo 16), and the
result is a chain over positions. Hidden positions add exact zeros.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.cpu import vectors
from verifier.cpu.processor import TILES
from verifier.cpu.rows import store_f32
from verifier.cpu.tiles import (
    narrow_score_tile,
    narrow_value_tile,
    wide_score_tile,
    wide_value_tile,
)

_MAX_ROWS = TILES.max_rows
_NUM_BLOCKS = tuple(TILES.num_blocks(max(1, rows)) for rows in range(_MAX_ROWS + 1))
MAX_TASK_ROWS = 2 * _MAX_ROWS
"""Query rows that share one reading of keys and values."""


@kernel
def attend(
    marker: npt.NDArray[Any], out: int, out_row: int, queries: int, keys: int, values: int,
    table: int, stride: int, num_rows: int, group: int, first_row: int, first_position: int,
    head_dim: int, window: int, scaling: Any, softcap: Any, scores: int, scores_row: int,
    result: int,
) -> None:  # fmt: skip
    """Attention of some rows of one sequence and K/V head. Row r of the sequence belongs to the
    token at `first_position + r // group`, and to the head's `r % group`-th query head.

    Args:
        out, out_row: address of the first token's first query head's output; bytes from token to
            token. Query heads are side by side.
        queries: address of row `first_row`, [num_rows, head_dim]; at most `MAX_TASK_ROWS`.
        keys, values: addresses of the head's keys and values in block 0.
        table: address of the sequence's block numbers, int32.
        stride: bytes from block to block.
        first_row: the first row's number in the sequence.
        first_position: of the sequence's first row.
        window: how many tokens a token sees, itself included; 0: all before it.
        scores, scores_row: scratch, and its bytes from row to row.
        result: scratch for [num_rows, head_dim].
    """
    last_position = first_position + (first_row + num_rows - 1) // group
    first_seen = 0
    if window:
        first_seen = max(0, first_position + first_row // group - window + 1)
    first_block = first_seen // 16
    num_blocks = last_position // 16 + 1 - first_block
    row_bytes = 4 * head_dim
    own_table = table + 4 * first_block
    num_tiles = (num_rows + _MAX_ROWS - 1) // _MAX_ROWS
    least = num_rows // num_tiles
    num_larger = num_rows - least * num_tiles

    start = 0
    for tile in range(num_tiles):
        rows = least + (1 if tile < num_larger else 0)
        width = _NUM_BLOCKS[rows]
        x, to = queries + start * row_bytes, scores + start * scores_row
        block = 0
        while block < num_blocks:
            place = own_table + 4 * block
            if block + width <= num_blocks:
                wide_score_tile(
                    marker, rows, x, row_bytes, keys, place, stride, head_dim, to + 64 * block,
                    scores_row,
                )  # fmt: skip
                block += width
            else:
                narrow_score_tile(
                    marker, rows, x, row_bytes, keys, place, stride, head_dim, to + 64 * block,
                    scores_row,
                )  # fmt: skip
                block += 1
        start += rows

    for row in range(num_rows):
        position = first_position + (first_row + row) // group
        seen_from = max(0, position - window + 1) if window else 0
        own = scores + row * scores_row
        _exponentials(
            own, seen_from - 16 * first_block, position + 1 - 16 * first_block, num_blocks,
            scaling, softcap,
        )  # fmt: skip

    start = 0
    for tile in range(num_tiles):
        rows = least + (1 if tile < num_larger else 0)
        width = _NUM_BLOCKS[rows]
        x, to = scores + start * scores_row, result + start * row_bytes
        block = 0
        while 16 * block < head_dim:
            own_values = values + block * 256 * marker.itemsize
            if 16 * (block + width) <= head_dim:
                wide_value_tile(
                    marker, rows, x, scores_row, own_values, own_table, stride, num_blocks,
                    to + 64 * block, row_bytes,
                )  # fmt: skip
                block += width
            else:
                narrow_value_tile(
                    marker, rows, x, scores_row, own_values, own_table, stride, num_blocks,
                    to + 64 * block, row_bytes,
                )  # fmt: skip
                block += 1
        start += rows

    for row in range(num_rows):
        own = scores + row * scores_row
        total = vectors.fill(np.float32(0.0))
        for block in range(num_blocks):
            total = vectors.add(total, vectors.load(own + 64 * block))
        factor = vectors.fill(np.float32(1.0) / vectors.sum_of(total))
        number = first_row + row
        to = out + number // group * out_row + number % group * row_bytes
        for offset in range(0, row_bytes, 64):
            value = vectors.load(result + row * row_bytes + offset)
            vectors.store(to + offset, vectors.multiply(value, factor))


@kernel
def _exponentials(
    scores: int, first: int, end: int, num_blocks: int, scaling: Any, softcap: Any
) -> None:
    """In place: exp(score - largest) for the scores from `first` to before `end`, after scaling and
    cap; 0 for all others of the blocks.
    """
    factor = vectors.fill(np.float32(scaling))
    largest = vectors.fill(np.float32(-np.inf))
    if softcap > 0:
        caps = vectors.fill(np.float32(softcap))
        for offset in range(0, 64 * num_blocks, 64):
            value = vectors.divide(vectors.multiply(vectors.load(scores + offset), factor), caps)
            vectors.store(scores + offset, vectors.multiply(vectors.tanh(value), caps))
    else:
        for offset in range(0, 64 * num_blocks, 64):
            value = vectors.multiply(vectors.load(scores + offset), factor)
            vectors.store(scores + offset, value)
    for i in range(first):
        store_f32(scores + 4 * i, np.float32(-np.inf))
    for i in range(end, 16 * num_blocks):
        store_f32(scores + 4 * i, np.float32(-np.inf))
    for offset in range(0, 64 * num_blocks, 64):
        largest = vectors.maximum(vectors.load(scores + offset), largest)
    top = vectors.fill(vectors.largest_of(largest))
    for offset in range(0, 64 * num_blocks, 64):
        value = vectors.subtract(vectors.load(scores + offset), top)
        vectors.store(scores + offset, vectors.exp(value))
