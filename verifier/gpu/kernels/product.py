"""A product of rows and a weight, a row's bits the same in any batch: all products of `--numerics
strict`, and those of few rows, which it computes faster than torch's libraries.

Libraries choose a product's kernel, and into how many parts a sum is cut, by the number of rows.
Here an output is one sum over all inputs, from the first to the last: one accumulator, to which
`tl.dot` adds TILE_INPUTS inputs at a time. How it adds these is the instruction's affair, so every
tile must use the same one. On a GPU it follows from the size of the tile's first dimension, so that
one holds outputs (64 or more, which is what a warp group of Hopper and Blackwell takes) and the
second one rows, of which there may be few. Inputs past the last one add exact zeros. A start of a
verifier compares the tiles' bits (`verifier/parity/gpu_check.py`).

A weight in groups (`verifier/gpu/groups.py`) is widened in registers where rows have 16 bits: on
Blackwell the compiler would round float32 to TF32 there.

One program computes a tile of outputs for a tile of rows. Programs of the same outputs come one
after the other, so that they find the weight in the L2 cache.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from verifier.gpu.groups import BLOCK_BYTES, LONGEST_GROUP, Element, GroupedWeight, Offset
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
# Of a weight in groups, an input takes a half or a quarter of the bytes: more are under way.
GROUPED_TILES = tuple(
    dataclasses.replace(tile, num_stages=6, num_roomy_stages=8) if tile.rows <= 32 else tile
    for tile in _HALF_TILES
)


# While the kernel before is under way, a program has the L2 cache read so many inputs' weights of
# its outputs. With more of them, that kernel's own reads waited.
PREFETCHED_INPUTS = tl.constexpr(512)
LINE_BITS = tl.constexpr(8 * 128)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
_UINT4 = tl.constexpr(int(Element.UINT4))
_INT8 = tl.constexpr(int(Element.INT8))
_E4M3 = tl.constexpr(int(Element.E4M3))
_NO_OFFSET = tl.constexpr(int(Offset.NONE))
_MINIMUM = tl.constexpr(int(Offset.MINIMUM))

# Up to so many rows of these types, this kernel is faster than torch's libraries; of more than 16
# because it overlaps.
FEW_ROWS = 32
FAST_FOR_FEW_ROWS = (torch.float16, torch.bfloat16)


def tile_for(num_rows: int, tiles: tuple[ProductTile, ...]) -> ProductTile:
    """The tile for so many rows."""
    return next((tile for tile in tiles if num_rows <= tile.up_to), tiles[-1])


class WeightArguments(NamedTuple):
    """What kernels take of a weight."""

    weight: torch.Tensor  # [outputs, inputs], or bytes of codes
    # [G, outputs] of a weight in groups: scale and offset together in an int32 or int64, since the
    # compiler loads nothing shorter ahead; a float32 or exponent alone.
    groups: torch.Tensor | None
    group_stride: int  # from a group of an output to its next one; 0: there is but one
    constants: dict[str, int | bool]  # as in `product_kernel`


def arguments_of(weight: torch.Tensor | GroupedWeight) -> WeightArguments:
    """Those of a plain weight, or of one in groups."""
    if isinstance(weight, torch.Tensor):
        constants = {"GROUP": 0, "ELEMENT": 0, "PER_BYTE": 0, "OFFSET": 0, "IS_BFLOAT16": False}
        return WeightArguments(weight, None, 0, constants)
    form, groups = weight.form, weight.groups
    if form.offset is not Offset.NONE:
        groups = groups.view(torch.int64 if form.scale is torch.float32 else torch.int32)
    constants = {
        "GROUP": form.group or LONGEST_GROUP,
        "ELEMENT": int(form.element),
        "PER_BYTE": form.element.per_byte,
        "OFFSET": int(form.offset),
        "IS_BFLOAT16": form.scale is torch.bfloat16,
    }
    stride = groups.shape[1] if form.group else 0
    return WeightArguments(weight.codes, groups, stride, constants)


# The number of rows differs from step to step: no step waits for the compiler because of it.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,  # [T, num_inputs], contiguous
    weight,  # [num_outputs, num_inputs], contiguous, of the same dtype; these three as in
    groups,  # `WeightArguments`
    group_stride,
    bias,  # [num_outputs], if HAS_BIAS
    product,  # [T, num_outputs], contiguous, written
    num_rows,  # T
    num_inputs,
    num_outputs,
    GROUP: tl.constexpr,  # inputs of a group; 0: the weight is not in groups
    ELEMENT: tl.constexpr,  # `Element` of codes, of which a byte has PER_BYTE
    PER_BYTE: tl.constexpr,
    OFFSET: tl.constexpr,  # `Offset` of groups
    IS_BFLOAT16: tl.constexpr,  # of 16-bit scales, else float16
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
    length = num_code_bytes(num_inputs, PER_BYTE) if GROUP else num_inputs
    if OVERLAPS:
        _prefetch_first(weight, outputs, length, num_outputs)
    wait_for_kernel_before(OVERLAPS)
    if GROUP:
        sums = sum_grouped(
            rows + at * num_inputs,
            is_row,
            weight + outputs * length,
            groups + outputs,
            group_stride,
            is_output,
            num_inputs,
            GROUP,
            ELEMENT,
            PER_BYTE,
            OFFSET,
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
def num_code_bytes(num_inputs, PER_BYTE: tl.constexpr):
    """Of an output."""
    return tl.cdiv(num_inputs, PER_BYTE * _BLOCK_BYTES) * _BLOCK_BYTES


@triton.jit
def sum_grouped(
    row_starts,  # as in `sum_products`
    is_row,
    code_starts,  # [TILE_OUTPUTS] pointers
    group_starts,  # [TILE_OUTPUTS] pointers
    group_stride,
    is_output,
    num_inputs,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """As `sum_products`, of a weight in groups."""
    # Of the codes that one place of a block's bytes has.
    NUM_GROUPS: tl.constexpr = (_BLOCK_BYTES + GROUP - 1) // GROUP
    part = tl.arange(0, _BLOCK_BYTES)
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for first in range(0, num_inputs, PER_BYTE * _BLOCK_BYTES):
        block = tl.load(
            code_starts[:, None] + (first // PER_BYTE + part)[None, :],
            mask=is_output[:, None],
            other=0,
        )
        for place in tl.static_range(PER_BYTE):
            start = first + place * _BLOCK_BYTES
            if place == 0 or GROUP < PER_BYTE * _BLOCK_BYTES:
                group = start // GROUP + tl.arange(0, NUM_GROUPS)
                numbers = tl.load(
                    group_starts[:, None] + group.to(tl.int64)[None, :] * group_stride,
                    mask=is_output[:, None] & (group * GROUP < num_inputs)[None, :],
                    other=0,
                )
            codes = (block >> (4 * place)) & 15 if PER_BYTE == 2 else block
            factors = _value_of(codes, ELEMENT)
            scale = _scale_of(numbers, IS_BFLOAT16)
            if NUM_GROUPS > 1:
                factors = factors.reshape([TILE_OUTPUTS, NUM_GROUPS, _BLOCK_BYTES // NUM_GROUPS])
                scale = scale[:, :, None]
            if OFFSET == _NO_OFFSET:
                factors = factors * scale
            else:
                offset = _offset_of(numbers, IS_BFLOAT16)
                if NUM_GROUPS > 1:
                    offset = offset[:, :, None]
                factors = (
                    factors * scale + offset if OFFSET == _MINIMUM else (factors - offset) * scale
                )
            factors = factors.reshape([TILE_OUTPUTS, _BLOCK_BYTES])
            values = tl.load(
                row_starts[None, :] + (start + part)[:, None],
                mask=is_row[None, :] & (start + part < num_inputs)[:, None],
                other=0.0,
            )
            factors = factors.to(row_starts.dtype.element_ty)
            sums = tl.dot(factors, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _value_of(codes, ELEMENT: tl.constexpr):
    """Codes, a byte each, as float32."""
    if ELEMENT == _UINT4:
        return codes.to(tl.float32)
    if ELEMENT == _INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    # Sign, exponent and mantissa at their places in a float16, whose exponents are larger. Not by
    # the type of FP8, which GPUs before 8.9 do not convert.
    if ELEMENT == _E4M3:
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    # Of E2M1, twice the value.
    bits = ((codes.to(tl.int16) & 8) << 12) | ((codes.to(tl.int16) & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0


@triton.jit
def _scale_of(numbers, IS_BFLOAT16: tl.constexpr):
    """The float32 scales of groups' numbers; of exponents half of each."""
    if numbers.dtype == tl.float32:
        return numbers
    if numbers.dtype == tl.uint8:
        # 2 ** (exponent - 128), of which the least two have no exponent of their own.
        exponent = numbers.to(tl.int32)
        bits = tl.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    if numbers.dtype == tl.int64:
        return numbers.to(tl.int32).to(tl.float32, bitcast=True)
    return _float_of(numbers, IS_BFLOAT16)


@triton.jit
def _offset_of(numbers, IS_BFLOAT16: tl.constexpr):
    """The float32 offsets behind the scales."""
    if numbers.dtype == tl.int64:
        return (numbers >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return _float_of(numbers >> 16, IS_BFLOAT16)


@triton.jit
def _float_of(words, IS_BFLOAT16: tl.constexpr):
    """The float32 of the low 16 bits of int32s."""
    if IS_BFLOAT16:
        return (words << 16).to(tl.float32, bitcast=True)
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
