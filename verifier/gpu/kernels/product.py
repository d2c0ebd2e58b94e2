"""A product of rows and a weight, a row's bits the same in any batch: all products of `--numerics
strict`, and those of few rows, which it computes faster than torch's libraries.

Libraries choose a product's kernel, and into how many parts a sum is cut, by the number of rows.
Here an output is one sum over all inputs, from the first to the last: one accumulator, to which
`tl.dot` adds TILE_INPUTS inputs at a time. How it adds these is the instruction's affair, so every
tile must use the same one. On a GPU it follows from the size of the tile's first dimension, so that
one holds outputs (64 or more, which is what a warp group of Hopper and Blackwell takes) and the
second one rows, of which there may be few. Inputs past the last one add exact zeros. A start of a
verifier compares the tiles' bits (`verifier/parity/gpu_check.py`).

A weight in groups (`verifier/gpu/groups.py`) is widened in registers, of rows of 16 bits: on
Blackwell the compiler would round float32 to TF32 there.

One program computes a tile of outputs for a tile of rows. Programs of the same outputs come one
after the other, so that they find the weight in the L2 cache.
"""

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from verifier.gpu import groups
from verifier.gpu.kernels.overlapping_kernels import prefetch, wait_for_kernel_before

# Bytes of a multiprocessor that GPUs from Ampere on have, of which a program gets all but a KiB:
# every one, and those for data centers.
SMALLEST_SHARED_MEMORY = 100 << 10
ROOMY_SHARED_MEMORY = 160 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """Sizes of a tile, when it is used, and how a GPU runs it."""

    # For so many rows; the last tile of a dtype is also for more.
    up_to: int
    rows: int
    outputs: int
    # Added by one `tl.dot`, which is the same instruction several times, on the same accumulator.
    inputs: int
    num_warps: int
    num_stages: int
    # Where there is `ROOMY_SHARED_MEMORY`; 0: the same.
    num_roomy_stages: int = 0


# A decode waits for the weight: its tile has few rows, long pieces of each output's weights, and
# many loads under way (stages). Two stages or more of a tile fit in the smallest shared memory. The
# bounds are an H100's.
_HALF_TILES = (
    ProductTile(
        up_to=16, rows=16, outputs=64, inputs=128, num_warps=4, num_stages=4, num_roomy_stages=6
    ),
    ProductTile(
        up_to=32, rows=32, outputs=64, inputs=128, num_warps=4, num_stages=4, num_roomy_stages=6
    ),
    ProductTile(
        up_to=128, rows=64, outputs=64, inputs=128, num_warps=4, num_stages=3, num_roomy_stages=4
    ),
    ProductTile(up_to=256, rows=128, outputs=128, inputs=64, num_warps=8, num_stages=3),
)
PRODUCT_TILES = {
    torch.float16: _HALF_TILES,
    torch.bfloat16: _HALF_TILES,
    # No tensor core computes it: each product and sum is a fused multiply-add.
    torch.float32: (
        ProductTile(up_to=16, rows=16, outputs=64, inputs=32, num_warps=4, num_stages=4),
        ProductTile(up_to=64, rows=64, outputs=64, inputs=32, num_warps=4, num_stages=3),
    ),
}
# Of a weight in groups, an input takes a quarter of the bytes: more of them are under way.
GROUPED_TILES = tuple(
    dataclasses.replace(tile, num_stages=6, num_roomy_stages=8) if tile.rows <= 32 else tile
    for tile in _HALF_TILES
)


# While the kernel before is under way, a program has the L2 cache read so many inputs' weights of
# its outputs. With more of them, that kernel's own reads waited.
PREFETCHED_INPUTS = tl.constexpr(512)
CODE_BLOCK = tl.constexpr(groups.CODE_BLOCK)
LINE_BITS = tl.constexpr(8 * 128)

# Up to so many rows of these types, this kernel is faster than torch's libraries; of more than 16
# because it overlaps.
FEW_ROWS = 32
FAST_FOR_FEW_ROWS = (torch.float16, torch.bfloat16)


def tile_for(num_rows: int, tiles: tuple[ProductTile, ...]) -> ProductTile:
    """The tile for so many rows."""
    return next((tile for tile in tiles if num_rows <= tile.up_to), tiles[-1])


# The number of rows differs from step to step: no step waits for the compiler because of it.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,  # [T, num_inputs], contiguous
    weight,  # [num_outputs, num_inputs], contiguous, of the same dtype; or codes of groups
    groups,  # [num_inputs / GROUP, num_outputs] int32, if GROUP: two floats of 16 bits
    bias,  # [num_outputs], if HAS_BIAS
    product,  # [T, num_outputs], contiguous, written
    num_rows,  # T
    num_inputs,
    num_outputs,
    GROUP: tl.constexpr,  # 0: the weight is not in groups
    HAS_MINIMA: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,  # of `groups`, else float16
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row = at < num_rows
    is_output = outputs < num_outputs
    # Items of an output's weights.
    length = tl.cdiv(num_inputs, CODE_BLOCK) * (CODE_BLOCK // 2) if GROUP else num_inputs
    if OVERLAPS:
        _prefetch_first(weight, outputs, length, num_outputs)
    wait_for_kernel_before(OVERLAPS)
    if GROUP:
        sums = _sum_grouped(
            rows + at * num_inputs,
            is_row,
            weight + outputs * length,
            groups + outputs,
            is_output,
            num_inputs,
            num_outputs,
            GROUP,
            HAS_MINIMA,
            IS_BFLOAT16,
            TILE_ROWS,
            TILE_OUTPUTS,
        )
    else:
        sums = sum_products(
            rows + at * num_inputs,
            is_row,
            weight + outputs * length,
            is_output,
            num_inputs,
            TILE_ROWS,
            TILE_OUTPUTS,
            TILE_INPUTS,
        )
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    places = product + at[None, :] * num_outputs + outputs[:, None]
    is_stored = is_row[None, :] & is_output[:, None]
    tl.store(places, sums.to(product.dtype.element_ty), mask=is_stored)


@triton.jit
def _prefetch_first(weight, outputs, num_inputs, num_outputs):
    """Of each output, the first PREFETCHED_INPUTS; in groups, bytes."""
    LINE: tl.constexpr = LINE_BITS // weight.dtype.element_ty.primitive_bitwidth
    inputs = tl.arange(0, PREFETCHED_INPUTS // LINE) * LINE
    # All lie within the weight, which may end before a tile does.
    starts = tl.minimum(outputs, num_outputs - 1) * num_inputs
    prefetch(weight + starts[:, None] + tl.minimum(inputs, num_inputs - 1)[None, :])


@triton.jit
def sum_products(
    row_starts,  # [TILE_ROWS] pointers
    is_row,  # [TILE_ROWS]; rows that are none are zeros
    weight_starts,  # [TILE_OUTPUTS] pointers
    is_output,  # [TILE_OUTPUTS]
    num_inputs,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Each output of each row, [TILE_OUTPUTS, TILE_ROWS] float32, summed in the order of inputs."""
    inputs = tl.arange(0, TILE_INPUTS)
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for first in range(0, num_inputs, TILE_INPUTS):
        is_input = first + inputs < num_inputs
        factors = tl.load(
            weight_starts[:, None] + (first + inputs)[None, :],
            mask=is_output[:, None] & is_input[None, :],
            other=0.0,
        )
        values = tl.load(
            row_starts[None, :] + (first + inputs)[:, None],
            mask=is_row[None, :] & is_input[:, None],
            other=0.0,
        )
        sums = tl.dot(factors, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _sum_grouped(
    row_starts,  # as in `sum_products`
    is_row,
    code_starts,  # [TILE_OUTPUTS] pointers
    group_starts,  # [TILE_OUTPUTS] pointers
    is_output,
    num_inputs,
    num_outputs,
    GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """As `sum_products`, of a weight in groups."""
    HALF: tl.constexpr = CODE_BLOCK // 2
    # Of a half.
    NUM_GROUPS: tl.constexpr = (HALF + GROUP - 1) // GROUP
    part = tl.arange(0, HALF)
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for first in range(0, num_inputs, CODE_BLOCK):
        both = tl.load(
            code_starts[:, None] + (first // 2 + part)[None, :], mask=is_output[:, None], other=0
        )
        for half in tl.static_range(2):
            start = first + half * HALF
            if half == 0 or GROUP < CODE_BLOCK:
                group = start // GROUP + tl.arange(0, NUM_GROUPS)
                # Of 32 bits, since the compiler loads nothing shorter ahead.
                pair = tl.load(
                    group_starts[:, None] + group.to(tl.int64)[None, :] * num_outputs,
                    mask=is_output[:, None] & (group * GROUP < num_inputs)[None, :],
                    other=0,
                )
            codes = ((both >> (4 * half)) & 15).to(tl.float32)
            scale = _float_of(pair, IS_BFLOAT16)
            offset = _float_of(pair >> 16, IS_BFLOAT16)
            if NUM_GROUPS > 1:
                codes = codes.reshape([TILE_OUTPUTS, NUM_GROUPS, HALF // NUM_GROUPS])
                scale, offset = scale[:, :, None], offset[:, :, None]
            factors = codes * scale + offset if HAS_MINIMA else (codes - offset) * scale
            factors = factors.reshape([TILE_OUTPUTS, HALF]).to(row_starts.dtype.element_ty)
            values = tl.load(
                row_starts[None, :] + (start + part)[:, None],
                mask=is_row[None, :] & (start + part < num_inputs)[:, None],
                other=0.0,
            )
            sums = tl.dot(factors, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _float_of(words, IS_BFLOAT16: tl.constexpr):
    """The float32 of the low 16 bits of int32s."""
    if IS_BFLOAT16:
        return (words << 16).to(tl.float32, bitcast=True)
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
