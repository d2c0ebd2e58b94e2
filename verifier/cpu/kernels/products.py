"""Products of rows with a packed weight, column by column.

All rows are strides apart in memory; addresses and strides are in bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import load_i64
from verifier.checkpoint.group_formats import GROUP
from verifier.cpu.kernels import vectors
from verifier.cpu.kernels.group_panels import round_row
from verifier.cpu.kernels.group_records import PLAIN_BFLOAT16, PLAIN_FLOAT32
from verifier.cpu.kernels.group_tiles import group_tile, group_values
from verifier.cpu.kernels.rows import embed
from verifier.cpu.kernels.tiles import in_groups, narrow_tile, wide_tile
from verifier.cpu.processor import TILES

_MAX_ROWS = TILES.max_rows
_NUM_BLOCKS = tuple(TILES.num_blocks(max(1, rows)) for rows in range(_MAX_ROWS + 1))
# Of many tiles, the inputs are cut into pieces, so that a piece of rows and weights stays in the
# caches while all tiles use it. Few tiles fit as they are, and uncut weights are read ahead.
_DEPTH_AT_ONCE = 256
_MAX_UNCUT_TILES = 8
_MAX_GROUP_ROWS = TILES.max_group_rows
_FLOATS, _BFLOATS, _HALVES = (np.empty(0, dtype=each) for each in (np.float32, np.uint16, np.int16))
PART_BYTES = 32
"""Of an entry of a table of parts, int64: the block after the part's last one; its number of
`group_records.NUMBERS`, or one of its `PLAIN_`s, 0 or less; the address of its first block; bytes
of a block.
"""


@kernel
def multiply(
    marker: npt.NDArray[Any],
    x: int,
    x_row: int,
    panel: int,
    num_rows: int,
    weights: int,
    depth: int,
    first_block: int,
    end_block: int,
    out: int,
    out_row: int,
) -> None:
    """Outputs of the blocks from `first_block` to before `end_block`, for all rows.

    Args:
        marker: its type is that of the weights, see `tiles`.
        panel: address of the rows as weights in groups take them, see `round_rows`.
        weights: address of [N / 16, depth, 16], or of the table of parts.
        out: address of the first row's output 0.
    """
    if not in_groups(marker):
        _multiply(marker, x, x_row, num_rows, weights, depth, first_block, end_block, out, out_row)
        return
    block, part, part_start = first_block, weights, 0
    while block < end_block:
        part_end = load_i64(part)
        stop = min(part_end, end_block)
        if block < stop:
            form, address, block_bytes = (
                load_i64(part + 8),
                load_i64(part + 16),
                load_i64(part + 24),
            )
            address -= part_start * block_bytes
            if form == PLAIN_FLOAT32:
                _multiply(_FLOATS, x, x_row, num_rows, address, depth, block, stop, out, out_row)
            elif form == PLAIN_BFLOAT16:
                _multiply(_BFLOATS, x, x_row, num_rows, address, depth, block, stop, out, out_row)
            elif form < 0:
                _multiply(_HALVES, x, x_row, num_rows, address, depth, block, stop, out, out_row)
            else:
                _multiply_groups(form, x, x_row, panel, num_rows, address, block_bytes, depth,
                                 block, stop, out, out_row)  # fmt: skip
            block = stop
        part_start = part_end
        part += PART_BYTES


@kernel
def _multiply_groups(
    form: int, x: int, x_row: int, panel: int, num_rows: int, weights: int, block_bytes: int,
    depth: int, first_block: int, end_block: int, out: int, out_row: int,
) -> None:  # fmt: skip
    num_tiles = (num_rows + _MAX_GROUP_ROWS - 1) // _MAX_GROUP_ROWS
    for block in range(first_block, end_block):
        row = 0
        for tile in range(num_tiles):
            # Rows are spread evenly.
            rows = (num_rows - row) // (num_tiles - tile)
            group_tile(form, rows, x + row * x_row, x_row, panel, row, num_rows,
                       weights + block * block_bytes, depth, out + row * out_row + 64 * block,
                       out_row)  # fmt: skip
            row += rows


@kernel
def _multiply(
    marker: npt.NDArray[Any],
    x: int,
    x_row: int,
    num_rows: int,
    weights: int,
    depth: int,
    first_block: int,
    end_block: int,
    out: int,
    out_row: int,
) -> None:
    if num_rows == 0:
        return
    weight_bytes = 16 * marker.itemsize
    block_bytes = depth * weight_bytes
    # Rows are spread evenly over as few tiles as there may be.
    num_tiles = (num_rows + _MAX_ROWS - 1) // _MAX_ROWS
    least = num_rows // num_tiles
    num_larger = num_rows - least * num_tiles
    most = least + (1 if num_larger else 0)
    width = _NUM_BLOCKS[most]
    at_once = depth if num_tiles <= _MAX_UNCUT_TILES else _DEPTH_AT_ONCE
    k = 0
    while k < depth:
        inputs = min(at_once, depth - k)
        block = first_block
        while block < end_block:
            w = weights + block * block_bytes + k * weight_bytes
            is_wide = block + width <= end_block
            num_blocks = width if is_wide else 1
            row = 0
            for tile in range(num_tiles):
                rows = least + (1 if tile < num_larger else 0)
                from_x = x + row * x_row + 4 * k
                to = out + row * out_row + 64 * block
                if is_wide and _NUM_BLOCKS[rows] == width:
                    wide_tile(marker, rows, from_x, x_row, w, block_bytes, inputs, to, out_row, k)
                else:
                    for i in range(num_blocks):
                        narrow_tile(
                            marker, rows, from_x, x_row, w + i * block_bytes, block_bytes, inputs,
                            to + 64 * i, out_row, k,
                        )  # fmt: skip
                row += rows
            block += num_blocks
        k += inputs


@kernel
def round_rows(
    x: int, x_row: int, first_row: int, end_row: int, num_rows: int, depth: int, panel: int
) -> None:
    """Rows from `first_row` to before `end_row` of `num_rows`, as weights in groups take them; none
    of less than a group, which no such weight has.

    Args:
        x: address of row 0.
        panel: address of the panel of all these rows (`group_panels`).
    """
    if depth < GROUP:
        return
    for row in range(first_row, end_row):
        round_row(x + row * x_row, depth, panel, row, num_rows)


@kernel
def embed_parts(out: int, parts: int, token: int, size: int, scale: Any) -> None:
    """The token's embedding times `scale`, from a table of one part."""
    form, address, block_bytes = load_i64(parts + 8), load_i64(parts + 16), load_i64(parts + 24)
    block, lane = address + token // 16 * block_bytes, token % 16
    if form == PLAIN_FLOAT32:
        embed(_FLOATS, out, address, 1, token, size, scale)
    elif form == PLAIN_BFLOAT16:
        embed(_BFLOATS, out, address, 1, token, size, scale)
    elif form < 0:
        embed(_HALVES, out, address, 1, token, size, scale)
    else:
        group_values(form, block, lane, size, np.float32(scale), out)


@kernel
def finish(
    y: int, y_row: int, num_rows: int, first_block: int, end_block: int, scales: int, bias: int
) -> None:
    """Multiplies outputs by their scales and adds their bias; an address of 0: there are none."""
    for row in range(num_rows):
        for block in range(first_block, end_block):
            offset = 64 * block
            value = vectors.load(y + row * y_row + offset)
            if scales:
                value = vectors.multiply(value, vectors.load(scales + offset))
            if bias:
                value = vectors.add(value, vectors.load(bias + offset))
            vectors.store(y + row * y_row + offset, value)


@kernel
def accumulate(
    x: int, x_row: int, y: int, y_row: int, num_rows: int, first_block: int, end_block: int
) -> None:
    """X += y."""
    for row in range(num_rows):
        for offset in range(64 * first_block, 64 * end_block, 64):
            place = x + row * x_row + offset
            value = vectors.add(vectors.load(place), vectors.load(y + row * y_row + offset))
            vectors.store(place, value)


@kernel
def cap(y: int, y_row: int, num_rows: int, first_block: int, end_block: int, limit: Any) -> None:
    """Y = limit * tanh(y / limit)."""
    limits = vectors.fill(np.float32(limit))
    for row in range(num_rows):
        for offset in range(64 * first_block, 64 * end_block, 64):
            place = y + row * y_row + offset
            value = vectors.tanh(vectors.divide(vectors.load(place), limits))
            vectors.store(place, vectors.multiply(limits, value))
