"""A product of rows and a weight, a row's bits the same in any batch: all products of `--numerics
strict`, and those of few rows, which it computes faster than torch's libraries.

Libraries choose a product's kernel, and into how many parts a sum is cut, by the number of rows.
Here an output is one sum over all inputs, from the first to the last: one accumulator, to which
`tl.dot` adds TILE_INPUTS inputs at a time. How it adds these is the instruction's affair, so every
tile must use the same one. On a GPU it follows from the size of the tile's first dimension, so that
one holds outputs (64 or more, which is what a warp group of Hopper and Blackwell takes) and the
second one rows, of which there may be few. Inputs past the last one add exact zeros. A start of a
verifier compares the tiles' bits (`verifier/parity/gpu_check.py`).

One program computes a tile of outputs for a tile of rows. Programs of the same outputs come one
after the other, so that they find the weight in the L2 cache.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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


# While the kernel before is under way, a program has the L2 cache read so many inputs' weights of
# its outputs. With more of them, that kernel's own reads waited.
PREFETCHED_INPUTS = tl.constexpr(512)
LINE_BITS = tl.constexpr(8 * 128)

# Up to so many rows of these types, this kernel is faster than torch's libraries; of more than 16
# because it overlaps.
FEW_ROWS = 32
FAST_FOR_FEW_ROWS = (torch.float16, torch.bfloat16)


def tile_for(num_rows: int, dtype: torch.dtype) -> ProductTile:
    """The tile for so many rows of a dtype."""
    tiles = PRODUCT_TILES[dtype]
    return next((tile for tile in tiles if num_rows <= tile.up_to), tiles[-1])


# The number of rows differs from step to step: no step waits for the compiler because of it.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,  # [T, num_inputs], contiguous
    weight,  # [num_outputs, num_inputs], contiguous, of the same dtype
    bias,  # [num_outputs], if HAS_BIAS
    product,  # [T, num_outputs], contiguous, written
    num_rows,  # T
    num_inputs,
    num_outputs,
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
    if OVERLAPS:
        _prefetch_first(weight, outputs, num_inputs, num_outputs)
    wait_for_kernel_before(OVERLAPS)
    sums = sum_products(
        rows + at * num_inputs,
        is_row,
        weight + outputs * num_inputs,
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
    """Of each output, the first PREFETCHED_INPUTS."""
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
