"""Products with experts' weights: rows sorted by expert, in tiles that belong to one expert each.

A pair is a token and one of its experts; token t has the pairs t * per_token + j. `order` holds the
pairs by expert; within it, a tile is TILE rows at most, of one expert. The number of tiles depends
on the pairs' experts, and a launch's on the number of pairs only: the last tiles may have no rows.

Worked example: pairs of experts 2 0 2 2, of 4 experts, in tiles of 2 rows, of which a launch has 4:

    order   1 0 2 3
    tiles   (0, 0, 1) (2, 1, 3) (2, 3, 4) (0, 0, 0)      expert, first row, end

Sums are float32, over BLOCK_K inputs at a time, from the first to the last, whatever else is in the
tile or in the step. Weights in groups are widened in registers (`verifier.gpu.kernels.product`).

Shape legend: T tokens, R = T * per_token pairs, E experts, H hidden size, I an expert's size.
"""

import triton
import triton.language as tl

from verifier.gpu.kernels.gate import gated_by
from verifier.gpu.kernels.product import num_code_bytes, sum_grouped


@triton.jit
def first_from(experts, bounds, num_pairs, num_halvings):
    """The first pair whose expert is at least a bound, of each bound, by halving."""
    found = tl.zeros_like(bounds)
    end = found + num_pairs
    for _ in range(num_halvings):
        middle = (found + end) // 2
        is_open = found < end
        expert = tl.load(experts + middle, mask=is_open, other=0)
        is_before = expert < bounds
        found = tl.where(is_open & is_before, middle + 1, found)
        end = tl.where(is_open & (is_before == 0), middle, end)
    return found


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_halvings"])
def find_tiles_kernel(
    experts,  # [R] int64: of the pairs in `order`, ascending
    tiles,  # [num_tiles, 3] int32, written
    num_pairs,
    num_tiles,
    num_halvings,  # 2 ** num_halvings > num_pairs
    TILE: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least the number of experts
    CHUNK: tl.constexpr,
):
    """One program, for all experts at once."""
    expert = tl.arange(0, EXPERTS)
    starts = first_from(experts, expert, num_pairs, num_halvings)
    ends = first_from(experts, expert + 1, num_pairs, num_halvings)
    counts = (ends - starts + TILE - 1) // TILE  # of tiles
    behind = tl.cumsum(counts, axis=0)
    for i in range(tl.max(counts, axis=0)):
        is_own = i < counts
        at = tiles + (behind - counts + i) * 3
        start = starts + i * TILE
        tl.store(at, expert, mask=is_own)
        tl.store(at + 1, start, mask=is_own)
        tl.store(at + 2, tl.minimum(start + TILE, ends), mask=is_own)
    total = tl.sum(counts, axis=0)
    nothing = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        is_unused = (tile >= total) & (tile < num_tiles)
        for field in tl.static_range(3):
            tl.store(tiles + tile * 3 + field, nothing, mask=is_unused)


@triton.jit
def gate_up_kernel(
    rows,  # [T, H]
    weights,  # [E, 2 * I, H]: gate, then up; these three as in `WeightArguments`
    groups,
    group_stride,
    bias,  # [E, 2 * I], if HAS_BIAS
    gated,  # [R, I], in the order of `order`, written
    order,  # [R] int64
    tiles,  # [num_tiles, 3]
    hidden_size,
    size,  # I
    per_token,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,  # these five as in `product_kernel`
    ELEMENT: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """activation(gate) * up of a tile, BLOCK_N columns."""
    tile = tiles + tl.program_id(0) * 3
    expert, start, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if start < end:
        place = start + tl.arange(0, TILE)
        is_row = place < end
        pairs = tl.load(order + place, mask=is_row, other=0)
        inputs = rows + (pairs // per_token) * hidden_size
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < size
        gates = expert * 2 * size + columns
        if GROUP:
            length = num_code_bytes(hidden_size, PER_BYTE)
            gate = sum_grouped(
                inputs, is_row, weights + gates * length, groups + gates, group_stride, is_column,
                hidden_size, GROUP, ELEMENT, PER_BYTE, OFFSET, IS_BFLOAT16, TILE, BLOCK_N,
            )  # fmt: skip
            up = sum_grouped(
                inputs, is_row, weights + (gates + size) * length, groups + gates + size,
                group_stride, is_column, hidden_size, GROUP, ELEMENT, PER_BYTE, OFFSET,
                IS_BFLOAT16, TILE, BLOCK_N,
            )  # fmt: skip
            gate, up = tl.trans(gate), tl.trans(up)
        else:
            # Transposed: [K, N].
            own = weights + (gates * hidden_size)[None, :]
            gate = tl.zeros([TILE, BLOCK_N], tl.float32)
            up = tl.zeros([TILE, BLOCK_N], tl.float32)
            for first in range(0, hidden_size, BLOCK_K):
                k = first + tl.arange(0, BLOCK_K)
                inside = k < hidden_size
                is_input = is_row[:, None] & inside[None, :]
                left = tl.load(inputs[:, None] + k[None, :], mask=is_input, other=0.0)
                is_weight = inside[:, None] & is_column[None, :]
                right = tl.load(own + k[:, None], mask=is_weight, other=0.0)
                gate = tl.dot(left, right, gate, input_precision="ieee")
                right = tl.load(own + size * hidden_size + k[:, None], mask=is_weight, other=0.0)
                up = tl.dot(left, right, up, input_precision="ieee")
        if HAS_BIAS:
            gate += tl.load(bias + gates, mask=is_column, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + gates + size, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result = gated_by(gate, up, ACTIVATION).to(gated.dtype.element_ty)
        at = gated + place.to(tl.int64)[:, None] * size + columns[None, :]
        tl.store(at, result, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_kernel(
    gated,  # [R, I], in the order of `order`
    weights,  # [E, H, I]; these three as in `WeightArguments`
    groups,
    group_stride,
    bias,  # [E, H], if HAS_BIAS
    outputs,  # [R, H], by pair, written
    order,  # [R] int64
    tiles,  # [num_tiles, 3]
    hidden_size,
    size,  # I
    GROUP: tl.constexpr,  # these five as in `product_kernel`
    ELEMENT: tl.constexpr,
    PER_BYTE: tl.constexpr,
    OFFSET: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The second product of a tile, BLOCK_N columns."""
    tile = tiles + tl.program_id(0) * 3
    expert, start, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if start < end:
        place = start + tl.arange(0, TILE)
        is_row = place < end
        inputs = gated + place.to(tl.int64) * size
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < hidden_size
        own = expert * hidden_size + columns
        if GROUP:
            total = sum_grouped(
                inputs, is_row, weights + own * num_code_bytes(size, PER_BYTE), groups + own,
                group_stride, is_column, size, GROUP, ELEMENT, PER_BYTE, OFFSET, IS_BFLOAT16, TILE,
                BLOCK_N,
            )  # fmt: skip
            total = tl.trans(total)
        else:
            total = tl.zeros([TILE, BLOCK_N], tl.float32)
            for first in range(0, size, BLOCK_K):
                k = first + tl.arange(0, BLOCK_K)
                inside = k < size
                is_input = is_row[:, None] & inside[None, :]
                left = tl.load(inputs[:, None] + k[None, :], mask=is_input, other=0.0)
                is_weight = inside[:, None] & is_column[None, :]
                at = weights + (own * size)[None, :] + k[:, None]
                right = tl.load(at, mask=is_weight, other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + own, mask=is_column, other=0.0).to(tl.float32)[None, :]
        pairs = tl.load(order + place, mask=is_row, other=0)
        at = outputs + pairs[:, None] * hidden_size + columns[None, :]
        tl.store(at, total.to(outputs.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def add_experts_kernel(
    outputs,  # [T * per_token, H], by pair
    weights,  # [T, per_token] float32
    mixed,  # [T, H], written
    hidden_size,
    per_token,
    BLOCK: tl.constexpr,
):
    """A token's weighted sum, from its likeliest expert on, BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden_size
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(per_token):
        pair = token * per_token + j
        output = tl.load(outputs + pair * hidden_size + columns, mask=inside, other=0.0)
        total += tl.load(weights + pair) * output.to(tl.float32)
    result = total.to(mixed.dtype.element_ty)
    tl.store(mixed + token * hidden_size + columns, result, mask=inside)
