"""Products of rows with weights in groups: sums of integers, which are exact and have no order.

A row's inputs are rounded to 16 bits, 32 inputs with one scale (`group_panels`). A group's products
are then summed as integers, and each group's sum is multiplied by the scales of both sides and
added to the output's chain in the order of the groups. So bits depend on nothing but the row and
the weights, as in `tiles`.

FP8 has no integers: a group's products with the row as it is are a chain of fused multiply-adds,
whose end is multiplied by the scale.
"""

from typing import Any

from llvmlite import ir
from numba import types

from verifier.checkpoint.group_formats import FORMATS, GROUP, GroupFormat
from verifier.cpu.kernels.group_panels import ROW_CODES, ROW_FACTORS, panel_places
from verifier.cpu.kernels.group_records import (
    NUMBERS,
    PARTS,
    STEPS,
    WHOLE,
    Part,
    head_bytes,
    load_codes,
    load_scales,
    load_zeros,
    locate,
    over_groups,
    plus,
    record_bytes,
)
from verifier.cpu.kernels.tiles import FP8_FACTOR, request, switch, widened
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
    fused,
    intrinsic,
    pointer,
)
from verifier.cpu.processor import TILES

_PREFETCHED_BYTES = 8192
_NAMES = {number: name for name, number in NUMBERS.items()}
_SHORT = ir.IntType(16)


def _pair_products(builder: Any, part: Part, inputs: Any, codes: Any) -> Any:
    """Sums of the products of neighbours: int32 of int16."""
    b = builder
    name = {"avx512": "llvm.x86.avx512.pmaddw.d.512", "avx2": "llvm.x86.avx2.pmadd.wd"}
    if (function := name.get(TILES.vectors)) is not None:
        return b.call(declared(b, function, 2, part.shorts, part.ints), [inputs, codes])

    def every_other(vector: Any, first: int) -> Any:
        places = ir.Constant(part.ints, list(range(first, 2 * part.count, 2)))
        return b.sext(b.shuffle_vector(vector, vector, places), part.ints)

    return b.add(
        *[b.mul(every_other(inputs, first), every_other(codes, first)) for first in (0, 1)]
    )


def _add_pair_products(builder: Any, part: Part, sums: Any, inputs: Any, codes: Any) -> Any:
    b = builder
    if not TILES.fuses_products:
        return b.add(sums, _pair_products(b, part, inputs, codes))
    function = declared(b, "llvm.x86.avx512.vpdpwssd.512", 3, part.ints, part.ints)
    return b.call(function, [sums, b.bitcast(inputs, part.ints), b.bitcast(codes, part.ints)])


def _multiply(
    builder: Any, form: GroupFormat, count: int, first_row: Any, panel: Any, num_rows: Any,
    block: Any, num_groups: Any, parts: list[Part],
) -> list[Any]:  # fmt: skip
    """Sums of `count` rows of a panel with parts of one block: a part's rows, part after part."""
    b = builder

    def add_group(group: Any, sums: list[Any]) -> list[Any]:
        record, inside, codes_at = locate(b, form, block, group)
        per_group = record_bytes(form) * GROUP // form.depth
        for offset in range(0, per_group, 64):
            request(b, plus(b, codes_at, _PREFETCHED_BYTES + offset))
        inputs_at, factors_at = panel_places(b, panel, first_row, num_rows, group, num_groups)
        for p, part in enumerate(parts):
            totals = _group_totals(b, form, count, inputs_at, codes_at, part)
            scales, minimum = load_scales(b, form, record, inside, part)
            for r in range(count):
                i = p * count + r
                place = plus(b, factors_at, ROW_FACTORS * r)
                row_scale = part.spread(b, b.load(pointer(b, place, FLOAT), align=4))
                for scale, total in zip(scales, totals[r], strict=True):
                    factor = b.fmul(scale, row_scale)
                    sums[i] = part.fused(b, b.sitofp(total, part.floats), factor, sums[i])
                if minimum is not None:
                    place = pointer(b, plus(b, place, 4), FLOAT)
                    row_sum = part.spread(b, b.load(place, align=4))
                    sums[i] = part.fused(b, minimum, row_sum, sums[i])
        return sums

    initial = [part.number(0.0) for part in parts for _ in range(count)]
    return over_groups(b, num_groups, initial, add_group)


def _in_order(builder: Any, totals: list[list[Any]], codes: Any) -> Any:
    """Emits no instruction, but what follows stays behind what was before. Else LLVM would load
    all of a group's inputs and codes first, and store them again. Returns the codes.
    """
    b = builder
    values: list[Any] = []
    if TILES.vectors == "avx2" and totals[0]:
        # Of 16 registers, none is left for what is loaded too early: the sums are ordered, too.
        values = [*(total[-1] for total in totals), codes]
    kinds = [value.type for value in values]
    results = ir.LiteralStructType(kinds) if values else ir.VoidType()
    constraints = [*["=x"] * len(values), *map(str, range(len(values))), "~{memory}"]
    statement = ir.InlineAsm(
        ir.FunctionType(results, kinds), "", ",".join(constraints), side_effect=True
    )
    returned = b.call(statement, values)
    if not values:
        return codes
    *sums, codes = (b.extract_value(returned, i) for i in range(len(values)))
    for total, value in zip(totals, sums, strict=True):
        total[-1] = value
    return codes


def _group_totals(
    builder: Any, form: GroupFormat, count: int, inputs_at: Any, codes_at: Any, part: Part
) -> list[list[Any]]:
    """Sums of a group's products, of each of its halves: int32, for each row."""
    b = builder
    totals: list[list[Any]] = [[] for _ in range(count)]
    at_once = 1 if TILES.vectors == "avx2" else 4 * form.halves
    for step, codes in enumerate(load_codes(b, form, codes_at, part)):
        begins = step % (STEPS // form.halves) == 0
        if count > 1 and step % at_once == 0:
            codes = _in_order(b, totals, codes)
        for r, total in enumerate(totals):
            place = pointer(b, plus(b, inputs_at, ROW_CODES * r + 4 * step), INT32)
            inputs = b.bitcast(part.spread(b, b.load(place, align=4)), part.shorts)
            if begins:
                total.append(_pair_products(b, part, inputs, codes))
            else:
                total[-1] = _add_pair_products(b, part, total[-1], inputs, codes)
    return totals


def _multiply_floats(
    builder: Any, form: GroupFormat, rows: list[Any], block: Any, num_groups: Any
) -> list[Any]:
    """As `_multiply`, of FP8 and rows that are not rounded."""
    b = builder

    def add_group(group: Any, sums: list[Any]) -> list[Any]:
        record = b.add(block, b.mul(group, ir.Constant(INT64, record_bytes(form))))
        for offset in range(0, record_bytes(form), 64):
            request(b, plus(b, record, _PREFETCHED_BYTES + offset))
        inputs_at = [b.add(row, b.mul(group, ir.Constant(INT64, 4 * GROUP))) for row in rows]
        totals = [constant(0.0)] * len(rows)
        for i in range(GROUP):
            weights = widened(b, types.uint8, plus(b, record, head_bytes(form) + LANES * i))
            for r, inputs in enumerate(inputs_at):
                place = pointer(b, plus(b, inputs, 4 * i), FLOAT)
                value = broadcast(b, b.load(place, align=4))
                totals[r] = fused(b, value, weights, totals[r])
        scale = b.load(pointer(b, record, FLOATS), align=4)
        scale = b.fmul(scale, constant(FP8_FACTOR))
        return [fused(b, total, scale, own) for total, own in zip(totals, sums, strict=True)]

    return over_groups(b, num_groups, [constant(0.0)] * len(rows), add_group)


@intrinsic
def group_tile(
    typing_context: Any, form: Any, count: Any, x: Any, x_row: Any, panel: Any, first_row: Any,
    num_rows: Any, w: Any, depth: Any, out: Any, out_row: Any,
) -> Any:  # fmt: skip
    """The products of `count` rows (at most `TILES.max_group_rows`) with a block.

    form          a number of `NUMBERS`
    x, x_row      of FP8: address of the first of the rows, float32; bytes from row to row
    panel         of others: address of the panel of rounded rows that has these
    first_row, num_rows  the first one's number in the panel; how many the panel has
    w             address of the block's first record
    depth         how many inputs
    out, out_row  address of the first output; bytes from row to row
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        form, count, x, x_row, panel, first_row, num_rows, w, depth, out, out_row = arguments
        b = builder
        num_groups = b.lshr(depth, ir.Constant(INT64, 5))

        def rows_at(base: Any, stride: Any, rows: int) -> list[Any]:
            return [b.add(base, b.mul(stride, ir.Constant(INT64, r))) for r in range(rows)]

        def emit_format(number: int) -> None:
            described = FORMATS[_NAMES[number]]

            def emit(rows: int) -> None:
                outs = rows_at(out, out_row, rows)
                # Sums of one row fit at once, so that its weights come from memory all the time.
                together = [PARTS] if rows == 1 else [[part] for part in PARTS]
                for parts in [[WHOLE]] if described.is_float else together:
                    if described.is_float:
                        own_rows = rows_at(x, x_row, rows)
                        sums = _multiply_floats(b, described, own_rows, w, num_groups)
                    else:
                        sums = _multiply(b, described, rows, first_row, panel, num_rows, w,
                                         num_groups, parts)  # fmt: skip
                    places = [plus(b, place, 4 * part.first) for part in parts for place in outs]
                    for place, value in zip(places, sums, strict=True):
                        b.store(value, pointer(b, place, value.type), align=4)

            switch(b, count, range(1, TILES.max_group_rows + 1), emit)

        switch(b, form, list(_NAMES), emit_format)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), code


@intrinsic
def group_values(
    typing_context: Any, form: Any, w: Any, lane: Any, depth: Any, factor: Any, out: Any
) -> Any:
    """Writes factor * the weights of one of a block's outputs, as float32 [depth]; not of FP8.

    form    a number of `NUMBERS`
    w       address of the block's first record
    lane    which of the 16 outputs
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        form, w, lane, depth, factor, out = arguments
        b = builder
        num_groups = b.lshr(depth, ir.Constant(INT64, 5))
        lane = b.trunc(lane, INT32)
        fma = declared(b, "llvm.fma.f32", 3, FLOAT, FLOAT)

        def emit(number: int) -> None:
            described = FORMATS[_NAMES[number]]

            def write_group(group: Any, _: list[Any]) -> list[Any]:
                record, inside, codes_at = locate(b, described, w, group)
                scales, minimum = load_scales(b, described, record, inside, WHOLE)
                own_scales = [b.extract_element(scale, lane) for scale in scales]
                # As the format has it: code - zero, then the product.
                zero = ir.Constant(INT32, 0 if described.halves == 2 else described.zero)
                if described.has_zeros:
                    zero = b.extract_element(load_zeros(b, record, WHOLE), lane)
                least = ir.Constant(FLOAT, -0.0)
                if described.has_minimum:
                    least = b.extract_element(minimum, lane)
                place = b.add(out, b.mul(group, ir.Constant(INT64, 4 * GROUP)))
                for step, codes in enumerate(load_codes(b, described, codes_at, WHOLE)):
                    scale = own_scales[step * described.halves // STEPS]
                    pair = b.extract_element(b.bitcast(codes, INTS), lane)
                    for i, number in enumerate(
                        (b.sext(b.trunc(pair, _SHORT), INT32), b.ashr(pair, ir.Constant(INT32, 16)))
                    ):
                        number = b.sub(number, zero)
                        value = b.call(fma, [b.sitofp(number, FLOAT), scale, least])
                        at = pointer(b, plus(b, place, 8 * step + 4 * i), FLOAT)
                        b.store(b.fmul(value, factor), at, align=4)
                return []

            over_groups(b, num_groups, [], write_group)

        switch(b, form, [n for n, name in _NAMES.items() if not FORMATS[name].is_float], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, types.int64), code
