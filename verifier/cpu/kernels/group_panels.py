"""Rows as weights in groups take them: rounded to 16 bits, 32 inputs with one scale.

A product's rounded rows are a panel: for each group of 32 inputs the rows' int16 [rows, 32]; then
for each group the rows' factors, float32 [rows, 2]: the scale, and scale * sum of the inputs.
"""

from typing import Any

from llvmlite import ir
from numba import types

from verifier.checkpoint.group_formats import GROUP
from verifier.cpu.kernels.group_records import over_groups, plus
from verifier.cpu.kernels.vectors import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    LANES,
    broadcast,
    constant,
    declared,
    intrinsic,
    pointer,
)

# Bytes of a row's group in a panel.
ROW_CODES, ROW_FACTORS = 2 * GROUP, 8
_LARGEST = 32767.0
# Below it, 32767 / x is not finite any more.
_SMALLEST = 1e-33


def rounded_row_bytes(depth: int) -> int:
    """Of a panel of rows of `depth` inputs, for each row."""
    return (ROW_CODES + ROW_FACTORS) * (depth // GROUP)


def panel_places(
    builder: Any, panel: Any, row: Any, num_rows: Any, group: Any, num_groups: Any
) -> tuple[Any, Any]:
    """Addresses of a row's codes and factors of a group."""
    b = builder
    index = b.add(b.mul(group, num_rows), row)
    factors = b.add(panel, b.mul(b.mul(num_groups, num_rows), ir.Constant(INT64, ROW_CODES)))
    return tuple(
        b.add(base, b.mul(index, ir.Constant(INT64, size)))
        for base, size in ((panel, ROW_CODES), (factors, ROW_FACTORS))
    )


@intrinsic
def round_row(typing_context: Any, x: Any, depth: Any, panel: Any, row: Any, num_rows: Any) -> Any:
    """Rounds `depth` floats at `x`, a multiple of 32, to row number `row` of a panel of `num_rows`.

    A group with a number that is not finite gets a scale of NaN.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, depth, panel, row, num_rows = arguments
        b = builder
        num_groups = b.lshr(depth, ir.Constant(INT64, 5))
        absolute = declared(b, "llvm.fabs.v16f32", 1)
        nearest = declared(b, "llvm.rint.v16f32", 1)
        largest_of = declared(b, "llvm.vector.reduce.umax.v16i32", 1, INTS, INT32)
        sum_of = declared(b, "llvm.vector.reduce.add.v16i32", 1, INTS, INT32)

        def round_group(group: Any, _: list[Any]) -> list[Any]:
            to, at = panel_places(b, panel, row, num_rows, group, num_groups)
            place = b.add(x, b.mul(group, ir.Constant(INT64, 4 * GROUP)))
            values = [
                b.load(pointer(b, plus(b, place, 4 * LANES * i), FLOATS), align=4) for i in (0, 1)
            ]
            # Sizes are ordered as their bits are; those of what is not finite come last.
            sizes = [b.bitcast(b.call(absolute, [value]), INTS) for value in values]
            larger = b.select(b.icmp_unsigned(">", *sizes), *sizes)
            largest = b.bitcast(b.call(largest_of, [larger]), FLOAT)
            is_finite = b.fcmp_ordered("<", largest, ir.Constant(FLOAT, float("inf")))
            fits = b.and_(is_finite, b.fcmp_ordered(">", largest, ir.Constant(FLOAT, _SMALLEST)))
            inverse = b.fdiv(ir.Constant(FLOAT, _LARGEST), largest)
            inverse = broadcast(b, b.select(fits, inverse, ir.Constant(FLOAT, 0.0)))
            codes = []
            for i, value in enumerate(values):
                number = b.call(nearest, [b.fmul(value, inverse)])
                # What is not finite cannot be converted.
                is_sound = b.fcmp_ordered("<=", b.call(absolute, [number]), constant(_LARGEST))
                codes.append(b.fptosi(b.select(is_sound, number, constant(0.0)), INTS))
                shorts = ir.VectorType(ir.IntType(16), LANES)
                there = pointer(b, plus(b, to, 2 * LANES * i), shorts)
                b.store(b.trunc(codes[i], shorts), there, align=2)
            total = b.sitofp(b.call(sum_of, [b.add(*codes)]), FLOAT)
            scale = b.fmul(largest, ir.Constant(FLOAT, 1.0 / _LARGEST))
            scale = b.select(is_finite, scale, ir.Constant(FLOAT, float("nan")))
            b.store(scale, pointer(b, at, FLOAT), align=4)
            b.store(b.fmul(scale, total), pointer(b, plus(b, at, 4), FLOAT), align=4)
            return []

        over_groups(b, num_groups, [], round_group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code
