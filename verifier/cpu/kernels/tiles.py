"""The inner tile of every product: rows times blocks of 16 outputs, with all sums in registers.

Each output is one chain of fused multiply-adds over the inputs in their order, whatever the shape
of the tile that computes it. So a row's results have the same bits alone and in any batch, on any
processor, and cut over threads in any way.

Weights are widened to float32 in registers, as they are loaded. A kernel learns their type from a
marker: an array (of any length) of the numpy type that `WeightType` gives.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from llvmlite import ir
from numba import types

from verifier.cpu.kernels.vectors import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    broadcast,
    constant,
    fused,
    intrinsic,
    pointer,
)
from verifier.cpu.processor import TILES

# How far ahead of their use weights are requested, all blocks of a tile together. By trial: with a
# third fewer or twice as many, products of 8 rows from memory were 5 to 10 % slower; without any,
# half as fast.
_PREFETCHED_BYTES = 8192
_CACHE_LINE = 64
# Values are requested so many blocks ahead of their use; keys, one tile ahead.
_VALUES_AHEAD = 2
TABLE_PADDING = max(*TILES.blocks, _VALUES_AHEAD)
"""How many numbers of any blocks must follow the last one of a block table: tiles look ahead."""

# Products with FP8 weights come this much too small.
FP8_FACTOR = 256.0

# Those of int8 are never computed: they stand for weights in groups.
_BITS = {types.float32: 32, types.uint16: 16, types.int16: 16, types.uint8: 8, types.int8: 8}


@intrinsic
def in_groups(typing_context: Any, marker: Any) -> Any:
    """Whether the marker's type is that of weights in groups; known as the kernel is compiled."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), marker.dtype == types.int8)

    return types.boolean(marker), code


def bytes_of(kind: Any) -> int:
    """Of one weight, by numba's type of its bits."""
    return _BITS[kind] // 8


def widened(builder: Any, kind: Any, address: Any) -> Any:
    """16 weights at an address, as floats; of FP8, divided by `FP8_FACTOR`."""
    if kind == types.float32:
        return builder.load(pointer(builder, address, FLOATS), align=4)
    stored = ir.IntType(_BITS[kind])
    if kind == types.int16:
        halves = builder.load(
            pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=2
        )
        return builder.fpext(halves, FLOATS)
    bits = builder.load(
        pointer(builder, address, ir.VectorType(stored, LANES)), align=_BITS[kind] // 8
    )
    if kind == types.uint16:
        words = builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * LANES))
        return builder.bitcast(words, FLOATS)
    # Sign, exponent and mantissa of e4m3 at their places in a float16, whose bias is 8 larger.
    shorts = ir.VectorType(ir.IntType(16), LANES)
    words = builder.and_(
        builder.shl(builder.sext(bits, shorts), ir.Constant(shorts, [7] * LANES)),
        ir.Constant(shorts, [0xBF80 - (1 << 16)] * LANES),
    )
    return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def request(builder: Any, address: Any) -> None:
    """Prefetches: requests a cache line without waiting for it. It need not exist."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
    # For reading, into every cache level, of data.
    flags = [ir.Constant(flag, value) for value in (0, 3, 1)]
    builder.call(function, [builder.inttoptr(address, byte), *flags])


class _Tile:
    """Emits the code of one tile shape."""

    def __init__(self, builder: Any, kind: Any, num_rows: int, num_blocks: int) -> None:
        self.builder = builder
        self.kind = kind
        self.num_rows = num_rows
        self.num_blocks = num_blocks

    def at(self, base: Any, *terms: tuple[Any, int]) -> Any:
        """Base + the sum of value * factor."""
        b = self.builder
        for value, factor in terms:
            b_term = value if factor == 1 else b.mul(value, ir.Constant(INT64, factor))
            base = b.add(base, b_term)
        return base

    def rows_at(self, base: Any, stride: Any) -> list[Any]:
        return [self.at(base, (stride, r)) if r else base for r in range(self.num_rows)]

    def of_table(self, base: Any, table: Any, index: int, stride: Any) -> Any:
        """Base + stride * the table's number at `index`."""
        b = self.builder
        address = self.at(table, (ir.Constant(INT64, 4 * index), 1))
        number = b.sext(b.load(pointer(b, address, INT32), align=4), INT64)
        return b.add(base, b.mul(number, stride))

    def stored_sums(self, out_rows: list[Any]) -> list[Any]:
        b = self.builder
        return [
            b.load(pointer(b, self.at(row, (ir.Constant(INT64, 4 * LANES), j)), FLOATS), align=4)
            for row in out_rows
            for j in range(self.num_blocks)
        ]

    def store(self, sums: list[Any], out_rows: list[Any]) -> None:
        b = self.builder
        for r, row in enumerate(out_rows):
            for j in range(self.num_blocks):
                address = self.at(row, (ir.Constant(INT64, 4 * LANES), j))
                b.store(sums[r * self.num_blocks + j], pointer(b, address, FLOATS), align=4)

    def multiply(
        self, sums: list[Any], x_rows: list[Any], blocks: list[Any], depth: Any,
        requested: list[Any],
    ) -> list[Any]:  # fmt: skip
        """The sums, continued over `depth` inputs (a multiple of 4).

        Args:
            x_rows: address of the first input of each row.
            blocks: address of each block's first weights.
            requested: addresses of weights that are used later, and requested as fast as those of
                `blocks` are read.
        """
        b = self.builder
        # Few rows have so little to do per input that the loop itself would show.
        unroll = 4 if self.num_rows <= 2 else 1
        entry = b.block
        loop = b.function.append_basic_block("inputs")
        done = b.function.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(INT64)
        k.add_incoming(ir.Constant(INT64, 0), entry)
        phis = [b.phi(FLOATS) for _ in sums]
        for phi, value in zip(phis, sums, strict=True):
            phi.add_incoming(value, entry)
        current = list(phis)
        size = bytes_of(self.kind)
        x_offset = b.mul(k, ir.Constant(INT64, 4))
        w_offset = b.mul(k, ir.Constant(INT64, LANES * size))
        for u in range(unroll):
            offset = ir.Constant(INT64, u * LANES * size)
            # Once for each cache line, where the loop is unrolled.
            if u * LANES * size % _CACHE_LINE == 0:
                for block in requested:
                    request(b, self.at(block, (w_offset, 1), (offset, 1)))
            weights = [
                widened(b, self.kind, self.at(block, (w_offset, 1), (offset, 1)))
                for block in blocks
            ]
            for r, row in enumerate(x_rows):
                address = self.at(row, (x_offset, 1), (ir.Constant(INT64, 4 * u), 1))
                value = broadcast(b, b.load(pointer(b, address, FLOAT), align=4))
                for j, weight in enumerate(weights):
                    i = r * self.num_blocks + j
                    current[i] = fused(b, value, weight, current[i])
        following = b.add(k, ir.Constant(INT64, unroll))
        k.add_incoming(following, loop)
        for phi, value in zip(phis, current, strict=True):
            phi.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, depth), loop, done)
        b.position_at_end(done)
        return current


def switch(
    builder: Any, num_rows: Any, cases: SequenceOf[int], emit: Callable[[int], None]
) -> None:
    """Emits `emit(rows)` for each possible number of rows, and jumps to the right one."""
    end = builder.function.append_basic_block("end")
    other = builder.function.append_basic_block("other")
    jump = builder.switch(num_rows, other)
    for rows in cases:
        block = builder.function.append_basic_block(f"rows_{rows}")
        jump.add_case(ir.Constant(INT64, rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(other)
    builder.branch(end)
    builder.position_at_end(end)


def _initial(tile: _Tile, out_rows: list[Any], resumes: Any) -> list[Any]:
    """Sums to start from: zeros, or if `resumes` what is at the output's place."""
    b = tile.builder
    entry = b.block
    stored = b.function.append_basic_block("resume")
    begin = b.function.append_basic_block("begin")
    b.cbranch(b.icmp_signed("!=", resumes, ir.Constant(INT64, 0)), stored, begin)
    b.position_at_end(stored)
    values = tile.stored_sums(out_rows)
    b.branch(begin)
    b.position_at_end(begin)
    sums = []
    for value in values:
        phi = b.phi(FLOATS)
        phi.add_incoming(constant(0.0), entry)
        phi.add_incoming(value, stored)
        sums.append(phi)
    return sums


def _product_tile(is_wide: bool) -> Any:
    def typed(
        typing_context: Any, marker: Any, num_rows: Any, x: Any, x_row: Any, w: Any, w_block: Any,
        depth: Any, out: Any, out_row: Any, resumes: Any,
    ) -> Any:  # fmt: skip
        kind = marker.dtype

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, num_rows, x, x_row, w, w_block, depth, out, out_row, resumes = arguments

            def emit(rows: int) -> None:
                num_blocks = TILES.num_blocks(rows) if is_wide else 1
                tile = _Tile(builder, kind, rows, num_blocks)
                out_rows = tile.rows_at(out, out_row)
                sums = _initial(tile, out_rows, resumes)
                blocks = [tile.at(w, (w_block, j)) if j else w for j in range(num_blocks)]
                ahead = ir.Constant(INT64, _PREFETCHED_BYTES // num_blocks)
                requested = [tile.at(block, (ahead, 1)) for block in blocks]
                sums = tile.multiply(sums, tile.rows_at(x, x_row), blocks, depth, requested)
                tile.store(sums, out_rows)

            switch(builder, num_rows, range(1, TILES.max_rows + 1), emit)
            return context.get_dummy_value()

        return types.void(marker, *[types.int64] * 9), code

    return intrinsic(typed)


wide_tile = _product_tile(True)
"""`wide_tile(marker, num_rows, x, x_row, w, w_block, depth, out, out_row, resumes)`: the products
of `num_rows` rows (at most `TILES.max_rows`) with `TILES.num_blocks(num_rows)` blocks.

    x, x_row      address of the rows' first input; bytes from row to row
    w, w_block    address of the first block's weights; bytes from block to block
    depth         how many inputs, a multiple of 4
    out, out_row  address of the first output; bytes from row to row
    resumes       0: sums start from zero; 1: from what the outputs' places contain
"""
narrow_tile = _product_tile(False)
"""As `wide_tile`, with one block."""


def _score_tile(is_wide: bool) -> Any:
    def typed(
        typing_context: Any, marker: Any, num_rows: Any, x: Any, x_row: Any, base: Any, table: Any,
        stride: Any, depth: Any, out: Any, out_row: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, num_rows, x, x_row, base, table, stride, depth, out, out_row = arguments

            def emit(rows: int) -> None:
                num_blocks = TILES.num_blocks(rows) if is_wide else 1
                tile = _Tile(builder, marker.dtype, rows, num_blocks)
                sums = [constant(0.0)] * (rows * num_blocks)
                # Those of this tile, and of the next one.
                all_blocks = [tile.of_table(base, table, j, stride) for j in range(2 * num_blocks)]
                blocks, requested = all_blocks[:num_blocks], all_blocks[num_blocks:]
                sums = tile.multiply(sums, tile.rows_at(x, x_row), blocks, depth, requested)
                tile.store(sums, tile.rows_at(out, out_row))

            switch(builder, num_rows, range(1, TILES.max_rows + 1), emit)
            return context.get_dummy_value()

        return types.void(marker, *[types.int64] * 9), code

    return intrinsic(typed)


wide_score_tile = _score_tile(True)
"""`wide_score_tile(marker, num_rows, x, x_row, base, table, stride, depth, out, out_row)`: as
`wide_tile`, with the blocks of weights that a block table names: at base + number * stride, for the
first `TILES.num_blocks(num_rows)` int32 numbers of the table.
"""
narrow_score_tile = _score_tile(False)
"""As `wide_score_tile`, with one block."""


def _value_tile(is_wide: bool) -> Any:
    def typed(
        typing_context: Any, marker: Any, num_rows: Any, x: Any, x_row: Any, base: Any, table: Any,
        stride: Any, num_entries: Any, out: Any, out_row: Any,
    ) -> Any:  # fmt: skip
        size = bytes_of(marker.dtype)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, num_rows, x, x_row, base, table, stride, num_entries, out, out_row = arguments
            b = builder

            def emit(rows: int) -> None:
                num_blocks = TILES.num_blocks(rows) if is_wide else 1
                tile = _Tile(b, marker.dtype, rows, num_blocks)
                x_rows, out_rows = tile.rows_at(x, x_row), tile.rows_at(out, out_row)
                initial = tile.stored_sums(out_rows)
                entry = b.block
                loop = b.function.append_basic_block("entries")
                done = b.function.append_basic_block("all_entries")
                b.branch(loop)
                b.position_at_end(loop)
                t = b.phi(INT64)
                t.add_incoming(ir.Constant(INT64, 0), entry)
                phis = [b.phi(FLOATS) for _ in initial]
                for phi, value in zip(phis, initial, strict=True):
                    phi.add_incoming(value, entry)
                entry_table = tile.at(table, (t, 4))
                blocks, requested = (
                    [
                        tile.at(group, (ir.Constant(INT64, j * LANES * LANES * size), 1))
                        for j in range(num_blocks)
                    ]
                    for group in (
                        tile.of_table(base, entry_table, 0, stride),
                        tile.of_table(base, entry_table, _VALUES_AHEAD, stride),
                    )
                )
                rows_here = [tile.at(row, (t, 4 * LANES)) for row in x_rows]
                depth = ir.Constant(INT64, LANES)
                sums = tile.multiply(phis, rows_here, blocks, depth, requested)
                following = b.add(t, ir.Constant(INT64, 1))
                t.add_incoming(following, b.block)
                for phi, value in zip(phis, sums, strict=True):
                    phi.add_incoming(value, b.block)
                b.cbranch(b.icmp_signed("<", following, num_entries), loop, done)
                b.position_at_end(done)
                tile.store(sums, out_rows)

            switch(builder, num_rows, range(1, TILES.max_rows + 1), emit)
            return context.get_dummy_value()

        return types.void(marker, *[types.int64] * 9), code

    return intrinsic(typed)


wide_value_tile = _value_tile(True)
"""`wide_value_tile(marker, num_rows, x, x_row, base, table, stride, num_entries, out, out_row)`:
as `wide_tile`, continued from the sums at the outputs' places, with inputs in groups of 16: the
weights [16, 16] of the t-th group's first block are at base + (t-th int32 number of the table) *
stride, and its other blocks follow.
"""
narrow_value_tile = _value_tile(False)
"""As `wide_value_tile`, with one block."""
