"""Attention over the paged K/V cache, read in place through block tables.

A block holds 16 tokens of a layer: for each K/V head the keys [head_dim, 16], then for each K/V
head the values [head_dim / 16, 16 tokens, 16]. So keys are packed weights of a product whose
outputs are scores, and values are packed weights of one whose inputs are probabilities: both are
computed by the tiles of every other product.

The rows of a task read keys and values together, a chunk of positions at a time. A row's sums are
kept relative to its largest score so far: where a chunk has a larger one, they are multiplied by
exp(the former largest - the new one).

A query's result depends on nothing but its own position and what it sees: scores are chains over
head_dim, the sum of exponentials is 16 chains over positions (by position modulo 16), the result is
a chain over positions, and chunks begin at fixed positions. Hidden positions add exact zeros.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.cpu.kernels import vectors
from verifier.cpu.kernels.rows import load_f32, store_f32
from verifier.cpu.kernels.tiles import (
    narrow_score_tile,
    narrow_value_tile,
    wide_score_tile,
    wide_value_tile,
)
from verifier.cpu.processor import TILES

_MAX_ROWS = TILES.max_rows
_NUM_BLOCKS = tuple(TILES.num_blocks(max(1, rows)) for rows in range(_MAX_ROWS + 1))
MAX_TASK_ROWS = 96
"""Query rows that share one reading of keys and values."""

_CHUNK_BLOCKS = 16
# The odd cache line keeps rows from competing for the same places in the caches.
_SCORES_ROW = 64 * _CHUNK_BLOCKS + 64
_SCORES_BYTES = _MAX_ROWS * _SCORES_ROW
# Of a row's sums, behind its result: 16 sums of exponentials, and 16 times its largest score.
_TAIL_BYTES = 128
_LOWEST = np.finfo(np.float32).min


def scratch_bytes(head_dim: int) -> int:
    """What a task needs."""
    return _SCORES_BYTES + MAX_TASK_ROWS * (4 * head_dim + _TAIL_BYTES)


@kernel
def attend(
    marker: npt.NDArray[Any], out: int, out_row: int, queries: int, keys: int, values: int,
    table: int, stride: int, num_rows: int, group: int, first_row: int, first_position: int,
    head_dim: int, window: int, scaling: Any, softcap: Any, sinks: int, scratch: int,
) -> None:  # fmt: skip
    """Attention of some rows of one sequence and K/V head. Row r of the sequence belongs to the
    token at `first_position + r // group`, and to the head's `r % group`-th query head.

    Args:
        out, out_row: address of the first token's first query head's output; bytes from token to
            token. Query heads are side by side.
        queries: address of row `first_row`, [num_rows, head_dim]; at most `MAX_TASK_ROWS`.
        keys, values: addresses of the head's keys and values in block 0.
        table: address of the sequence's block numbers, int32; `TABLE_PADDING` others follow.
        stride: bytes from block to block.
        first_row: the first row's number in the sequence.
        first_position: of the sequence's first row.
        window: how many tokens a token sees, itself included; 0: all before it.
        sinks: address of the logits of tokens without a value, [group] by query head; 0: none.
        scratch: of `scratch_bytes(head_dim)`.
    """
    row_bytes, sums_row = 4 * head_dim, 4 * head_dim + _TAIL_BYTES
    sums = scratch + _SCORES_BYTES
    for row in range(num_rows):
        own = sums + row * sums_row
        for offset in range(0, row_bytes + 64, 64):
            vectors.store(own + offset, vectors.fill(np.float32(0.0)))
        largest = _LOWEST
        if sinks:
            sink = load_f32(sinks + 4 * ((first_row + row) % group))
            # NaN stays NaN, and infinity as a minimum is exp(-infinity) = 0.
            largest = _LOWEST if sink < _LOWEST else sink
            share = vectors.exp(vectors.fill(sink - largest))
            store_f32(own + row_bytes, vectors.largest_of(share))
        vectors.store(own + row_bytes + 64, vectors.fill(largest))

    first_seen = 0
    if window:
        first_seen = max(0, first_position + first_row // group - window + 1)
    begin = first_seen // 16
    end = (first_position + (first_row + num_rows - 1) // group) // 16 + 1
    num_tiles = (num_rows + _MAX_ROWS - 1) // _MAX_ROWS
    while begin < end:
        chunk_end = min(end, (begin // _CHUNK_BLOCKS + 1) * _CHUNK_BLOCKS)
        start = 0
        for tile in range(num_tiles):
            rows = (num_rows - start) // (num_tiles - tile)
            last_seen = first_position + (first_row + start + rows - 1) // group
            num_blocks = min(chunk_end, last_seen // 16 + 1) - begin
            if num_blocks > 0:
                _score(
                    marker, rows, queries + start * row_bytes, head_dim, keys, table + 4 * begin,
                    stride, num_blocks, scratch,
                )  # fmt: skip
                for row in range(rows):
                    number = start + row
                    position = first_position + (first_row + number) // group
                    seen_from = max(0, position - window + 1) if window else 0
                    _exponentiate(
                        scratch + row * _SCORES_ROW, seen_from - 16 * begin,
                        position + 1 - 16 * begin, num_blocks, scaling, softcap,
                        sums + number * sums_row, row_bytes,
                    )  # fmt: skip
                _add_values(
                    marker, rows, scratch, values, table + 4 * begin, stride, num_blocks,
                    sums + start * sums_row, head_dim,
                )  # fmt: skip
            start += rows
        begin = chunk_end

    for row in range(num_rows):
        own = sums + row * sums_row
        total = vectors.sum_of(vectors.load(own + row_bytes))
        factor = vectors.fill(np.float32(1.0) / total)
        number = first_row + row
        to = out + number // group * out_row + number % group * row_bytes
        for offset in range(0, row_bytes, 64):
            vectors.store(to + offset, vectors.multiply(vectors.load(own + offset), factor))


@kernel
def _score(
    marker: npt.NDArray[Any], rows: int, queries: int, head_dim: int, keys: int, table: int,
    stride: int, num_blocks: int, scores: int,
) -> None:  # fmt: skip
    """Scores of a tile's rows with the keys of some blocks, not yet scaled."""
    width = _NUM_BLOCKS[rows]
    block = 0
    while block < num_blocks:
        place, to = table + 4 * block, scores + 64 * block
        if block + width <= num_blocks:
            wide_score_tile(
                marker, rows, queries, 4 * head_dim, keys, place, stride, head_dim, to, _SCORES_ROW
            )
            block += width
        else:
            narrow_score_tile(
                marker, rows, queries, 4 * head_dim, keys, place, stride, head_dim, to, _SCORES_ROW
            )
            block += 1


@kernel
def _add_values(
    marker: npt.NDArray[Any], rows: int, probabilities: int, values: int, table: int, stride: int,
    num_blocks: int, sums: int, head_dim: int,
) -> None:  # fmt: skip
    """Adds the values of some blocks, times the probabilities, to the results of a tile's rows."""
    width, sums_row = _NUM_BLOCKS[rows], 4 * head_dim + _TAIL_BYTES
    block = 0
    while 16 * block < head_dim:
        own_values, to = values + block * 256 * marker.itemsize, sums + 64 * block
        if 16 * (block + width) <= head_dim:
            wide_value_tile(
                marker, rows, probabilities, _SCORES_ROW, own_values, table, stride, num_blocks, to,
                sums_row,
            )  # fmt: skip
            block += width
        else:
            narrow_value_tile(
                marker, rows, probabilities, _SCORES_ROW, own_values, table, stride, num_blocks, to,
                sums_row,
            )  # fmt: skip
            block += 1


@kernel
def _exponentiate(
    scores: int, first: int, end: int, num_blocks: int, scaling: Any, softcap: Any, sums: int,
    row_bytes: int,
) -> None:  # fmt: skip
    """Of a row, in place: exp(score - largest so far) for the scores from `first` to before `end`,
    after scaling and cap; 0 for all others of the chunk. Updates its sum of exponentials, and makes
    its result relative to the largest score.
    """
    bytes_end = 64 * num_blocks
    factor = vectors.fill(np.float32(scaling))
    if softcap > 0:
        caps = vectors.fill(np.float32(softcap))
        for offset in range(0, bytes_end, 64):
            value = vectors.divide(vectors.multiply(vectors.load(scores + offset), factor), caps)
            vectors.store(scores + offset, vectors.multiply(vectors.tanh(value), caps))
        factor = vectors.fill(np.float32(1.0))
    for i in range(min(first, 16 * num_blocks)):
        store_f32(scores + 4 * i, np.float32(-np.inf))
    for i in range(max(0, end), 16 * num_blocks):
        store_f32(scores + 4 * i, np.float32(-np.inf))

    former = vectors.load(sums + row_bytes + 64)
    largest = former
    for offset in range(0, bytes_end, 64):
        value = vectors.multiply(vectors.load(scores + offset), factor)
        largest = vectors.maximum(value, largest)
    top = vectors.fill(vectors.largest_of(largest))
    vectors.store(sums + row_bytes + 64, top)
    change = vectors.exp(vectors.subtract(former, top))
    for offset in range(0, row_bytes + 64, 64):
        value = vectors.load(sums + offset)
        vectors.store(sums + offset, vectors.multiply(value, change))

    total = vectors.load(sums + row_bytes)
    for offset in range(0, bytes_end, 64):
        value = vectors.multiply(vectors.load(scores + offset), factor)
        value = vectors.exp(vectors.subtract(value, top))
        vectors.store(scores + offset, value)
        total = vectors.add(total, value)
    vectors.store(sums + row_bytes, total)
