"""Products of rows with weights in groups: sums of integers, which are exact and have no order.

A row's inputs are rounded to 16 bits, 32 inputs with one scale (`round_row`). A group's products
are then summed as integers, and each group's sum is multiplied by the scales of both sides and
added to the output's chain in the order of the groups. So bits depend on nothing but the row and
the weights, as in `tiles`.

A product's rounded rows are a panel: for each group of 32 inputs the rows' int16 [rows, 32]; then
for each group the rows' factors, float32 [rows, 2]: the scale, and scale * sum of the inputs.

A block of weights has 16 outputs side by side, and for each of its K / 32 groups the codes of two
inputs of 16 outputs as 32 numbers, 16 times. Codes of 4 bits are the quarters of int16 numbers;
their higher bits follow. A record is the factors of a block of the file, then its groups' codes.

FP8 has no integers: a group's products with the row as it is are a chain of fused multiply-adds,
whose end is multiplied by the scale. A record is 16 scales, then for each input 16 codes.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types

from verifier.checkpoint.group_formats import (
    FORMATS,
    GROUP,
    SUPER_GROUPS,
    TWICE_E2M1,
    GroupFormat,
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

PLAIN_FLOAT32, PLAIN_BFLOAT16, PLAIN_FLOAT16 = 0, -1, -2
"""The numbers of weights that are not in groups."""
NUMBERS = {name: number for number, name in enumerate(FORMATS, start=1)}
"""The number of each format in a table of parts."""
FP8 = NUMBERS["FP8"]

STEPS = GROUP // 2
_CODE_VECTORS = 64
# Bytes of a row's group in a panel.
_ROW_CODES, _ROW_FACTORS = 2 * GROUP, 8
_LARGEST = 32767.0
# Below it, 32767 / x is not finite any more.
_SMALLEST = 1e-33
_PREFETCHED_BYTES = 8192

_BYTE, _SHORT, _HALF = ir.IntType(8), ir.IntType(16), ir.HalfType()


class _Part:
    """Some of a block's outputs, side by side in vectors: `count` of them from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.floats, self.ints = ir.VectorType(FLOAT, count), ir.VectorType(INT32, count)
        # Two of each output.
        self.shorts = ir.VectorType(_SHORT, 2 * count)

    def number(self, value: float) -> Any:
        return ir.Constant(self.floats, [value] * self.count)

    def integers(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.count)

    def pairs(self, value: int) -> Any:
        return ir.Constant(self.shorts, [value] * (2 * self.count))

    def load(self, builder: Any, address: Any, kind: Any) -> Any:
        """Its values of the 16 side by side at an address, aligned to one byte."""
        place = _plus(builder, address, {FLOAT: 4, _HALF: 2, _BYTE: 1}[kind] * self.first)
        vector = ir.VectorType(kind, self.count)
        return builder.load(pointer(builder, place, vector), align=1)

    def load_shorts(self, builder: Any, address: Any) -> Any:
        """As `load`, of two int16 of each output."""
        place = _plus(builder, address, 4 * self.first)
        return builder.load(pointer(builder, place, self.shorts), align=2)

    def spread(self, builder: Any, value: Any) -> Any:
        """The scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(value.type, self.count), ir.Undefined)
        first = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
        return builder.shuffle_vector(first, nothing, self.integers(0))

    def fused(self, builder: Any, x: Any, y: Any, z: Any) -> Any:
        """The value of x * y + z, rounded once."""
        name = f"llvm.fma.v{self.count}f32"
        return builder.call(declared(builder, name, 3, self.floats, self.floats), [x, y, z])


_WHOLE = _Part(0, LANES)
# Outputs whose sums fit in registers beside each other.
_PARTS = [_Part(first, TILES.group_outputs) for first in range(0, LANES, TILES.group_outputs)]


def group_bytes(form: GroupFormat) -> int:
    """Of the codes of a group of 16 outputs."""
    return _CODE_VECTORS * form.bits


def head_bytes(form: GroupFormat) -> int:
    """Of the factors of a record: float16 [1 or 2, 16], then of a format with a K for each group
    its scales and minima, uint8 [1 or 2, 16]. Of a format with zeros: float32 [16], int8 [16]; of
    FP8 float32 [16]; of MXFP4 uint8 [16].
    """
    if form.is_mx:
        return LANES
    if form.has_zeros or form.is_float:
        return (4 + form.has_zeros) * LANES
    scales = form.halves + form.has_minimum
    return 2 * LANES * (1 + form.has_minimum) + form.is_super * SUPER_GROUPS * scales * LANES


def record_bytes(form: GroupFormat) -> int:
    """Of a record."""
    return head_bytes(form) + form.depth // GROUP * group_bytes(form)


def rounded_row_bytes(depth: int) -> int:
    """Of a panel of rows of `depth` inputs, for each row."""
    return (_ROW_CODES + _ROW_FACTORS) * (depth // GROUP)


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(INT64, offset)) if offset else address


def _codes(builder: Any, form: GroupFormat, group: Any, part: _Part) -> Iterator[Any]:
    """Codes of the group at an address, as int16: two inputs of each output."""
    b = builder
    if form.is_mx:
        yield from _e2m1_codes(b, group, part)
        return
    if form.bits == 8:
        kind = ir.VectorType(_BYTE, 2 * part.count)
        for step in range(STEPS):
            place = pointer(b, _plus(b, group, 2 * (LANES * step + part.first)), kind)
            yield b.sext(b.load(place, align=1), part.shorts)
        return
    quarters: Any = None
    high: Any = None
    extra = form.bits - 4
    for step in range(STEPS):
        if step % 4 == 0:
            place = _plus(b, group, _CODE_VECTORS * (step // 4))
            quarters = part.load_shorts(b, place)
        codes = b.lshr(quarters, part.pairs(4 * (step % 4))) if step % 4 else quarters
        if step % 4 < 3:
            codes = b.and_(codes, part.pairs(15))
        if extra:
            per_vector = STEPS // extra
            if step % per_vector == 0:
                place = _plus(b, group, _CODE_VECTORS * (4 + step // per_vector))
                high = part.load_shorts(b, place)
            shift = extra * (step % per_vector) - 4
            moved = (
                b.lshr(high, part.pairs(shift)) if shift >= 0 else b.shl(high, part.pairs(-shift))
            )
            codes = b.or_(codes, b.and_(moved, part.pairs(((1 << extra) - 1) << 4)))
        if form.halves == 2:
            codes = b.sub(codes, part.pairs(form.zero))
        yield codes


def _e2m1_codes(builder: Any, group: Any, part: _Part) -> Iterator[Any]:
    """As `_codes`, of MXFP4: twice the values of codes."""
    b = builder
    for vector in range(STEPS // 4):
        place = _plus(b, group, _CODE_VECTORS * vector)
        quarters = part.load_shorts(b, place)
        # Each byte has two codes: of the lower ones two steps are made, and two of the upper ones.
        pairs = [
            _twice_e2m1(b, b.and_(codes, part.pairs(0x0F0F)))
            for codes in (quarters, b.lshr(quarters, part.pairs(4)))
        ]
        yield from (b.ashr(b.shl(pair, part.pairs(8)), part.pairs(8)) for pair in pairs)
        yield from (b.ashr(pair, part.pairs(8)) for pair in pairs)


def _twice_e2m1(builder: Any, codes: Any) -> Any:
    """Twice the values of codes, each a byte of int16."""
    b = builder
    # Looks up bytes of a table, so many at once.
    num_bytes, name = 16, "llvm.aarch64.neon.tbl1.v16i8"
    if TILES.vectors == "avx2":
        num_bytes, name = 32, "llvm.x86.avx2.pshuf.b"
    elif TILES.vectors == "avx512":
        num_bytes, name = 64, "llvm.x86.avx512.pshuf.b.512"
    kind = ir.VectorType(_BYTE, num_bytes)
    table = ir.Constant(kind, [value & 255 for value in TWICE_E2M1] * (num_bytes // 16))
    whole = b.bitcast(codes, ir.VectorType(_BYTE, 2 * codes.type.count))
    parts = []
    for start in range(0, 2 * codes.type.count, num_bytes):
        places = list(range(start, start + num_bytes))
        part = b.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(INT32, num_bytes), places))
        parts.append(b.call(declared(b, name, 2, kind, kind), [table, part]))
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        both = ir.Constant(ir.VectorType(INT32, size), list(range(size)))
        parts = [b.shuffle_vector(parts[i], parts[i + 1], both) for i in range(0, len(parts), 2)]
    return b.bitcast(parts[0], codes.type)


def _zeros(builder: Any, record: Any, part: _Part) -> Any:
    """The zeros of a group, as int32."""
    b = builder
    return b.sext(part.load(b, _plus(b, record, 4 * LANES), _BYTE), part.ints)


def _scales(
    builder: Any, form: GroupFormat, record: Any, group: Any, part: _Part
) -> tuple[list[Any], Any]:
    """Scales of a group's halves, and its minima or None. Args: group: its number in the record."""
    b = builder
    if form.is_mx:
        exponents = b.zext(part.load(b, record, _BYTE), part.ints)
        small, one, place_of = (part.integers(n) for n in (1 << 21, 1, 23))
        bits = b.select(
            b.icmp_unsigned(">", exponents, one),
            b.shl(b.sub(exponents, one), place_of),
            b.shl(small, exponents),
        )
        return [b.bitcast(bits, part.floats)], None
    if form.has_zeros:
        scale = part.load(b, record, FLOAT)
        negated = b.fsub(part.number(-0.0), scale)
        return [scale], b.fmul(negated, b.sitofp(_zeros(b, record, part), part.floats))

    def factors(offset: int) -> Any:
        return b.fpext(part.load(b, _plus(b, record, offset), _HALF), part.floats)

    def multiples(index: int, is_signed: bool) -> Any:
        per_group = (form.halves + form.has_minimum) * LANES
        place = b.add(record, b.mul(group, ir.Constant(INT64, per_group)))
        place = _plus(b, place, 2 * LANES * (1 + form.has_minimum) + LANES * index)
        wide = (b.sext if is_signed else b.zext)(part.load(b, place, _BYTE), part.ints)
        return b.sitofp(wide, part.floats)

    scale = factors(0)
    minimum = factors(2 * LANES) if form.has_minimum else None
    if form.is_super:
        if form.has_minimum:
            negated = b.fsub(part.number(-0.0), minimum)
            minimum = b.fmul(negated, multiples(1, False))
            return [b.fmul(scale, multiples(0, False))], minimum
        return [b.fmul(scale, multiples(half, True)) for half in range(form.halves)], None
    if form.zero:
        minimum = b.fmul(scale, part.number(float(-form.zero)))
    return [scale], minimum


def _pair_products(builder: Any, part: _Part, inputs: Any, codes: Any) -> Any:
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


def _add_pair_products(builder: Any, part: _Part, sums: Any, inputs: Any, codes: Any) -> Any:
    b = builder
    if not TILES.fuses_products:
        return b.add(sums, _pair_products(b, part, inputs, codes))
    function = declared(b, "llvm.x86.avx512.vpdpwssd.512", 3, part.ints, part.ints)
    return b.call(function, [sums, b.bitcast(inputs, part.ints), b.bitcast(codes, part.ints)])


def _place(builder: Any, form: GroupFormat, block: Any, group: Any) -> tuple[Any, Any, Any]:
    """Of group number `group` of a block: its record, its number there, its codes."""
    b = builder
    per_record = form.depth // GROUP
    shift = per_record.bit_length() - 1
    number = b.lshr(group, ir.Constant(INT64, shift))
    inside = b.and_(group, ir.Constant(INT64, per_record - 1))
    record = b.add(block, b.mul(number, ir.Constant(INT64, record_bytes(form))))
    codes = b.add(record, b.mul(inside, ir.Constant(INT64, group_bytes(form))))
    return record, inside, _plus(b, codes, head_bytes(form))


def _loop(
    builder: Any, count: Any, initial: list[Any], emit: Callable[..., list[Any]]
) -> list[Any]:
    """Emits `emit(i, values)` for each i below `count`, at least 1. Returns the last values."""
    b = builder
    entry = b.block
    loop, done = (b.function.append_basic_block(name) for name in ("groups", "all_groups"))
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(INT64)
    i.add_incoming(ir.Constant(INT64, 0), entry)
    phis = [b.phi(value.type) for value in initial]
    for phi, value in zip(phis, initial, strict=True):
        phi.add_incoming(value, entry)
    values = emit(i, list(phis))
    following = b.add(i, ir.Constant(INT64, 1))
    i.add_incoming(following, b.block)
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return values


def _panel_places(
    builder: Any, panel: Any, row: Any, num_rows: Any, group: Any, num_groups: Any
) -> tuple[Any, Any]:
    """Addresses of a row's codes and factors of a group."""
    b = builder
    index = b.add(b.mul(group, num_rows), row)
    factors = b.add(panel, b.mul(b.mul(num_groups, num_rows), ir.Constant(INT64, _ROW_CODES)))
    return tuple(
        b.add(base, b.mul(index, ir.Constant(INT64, size)))
        for base, size in ((panel, _ROW_CODES), (factors, _ROW_FACTORS))
    )


def _multiply(
    builder: Any, form: GroupFormat, count: int, first_row: Any, panel: Any, num_rows: Any,
    block: Any, num_groups: Any, parts: list[_Part],
) -> list[Any]:  # fmt: skip
    """Sums of `count` rows of a panel with parts of one block: a part's rows, part after part."""
    b = builder

    def add_group(group: Any, sums: list[Any]) -> list[Any]:
        record, inside, codes_at = _place(b, form, block, group)
        per_group = record_bytes(form) * GROUP // form.depth
        for offset in range(0, per_group, 64):
            request(b, _plus(b, codes_at, _PREFETCHED_BYTES + offset))
        inputs_at, factors_at = _panel_places(b, panel, first_row, num_rows, group, num_groups)
        for p, part in enumerate(parts):
            totals = _group_totals(b, form, count, inputs_at, codes_at, part)
            scales, minimum = _scales(b, form, record, inside, part)
            for r in range(count):
                i = p * count + r
                place = _plus(b, factors_at, _ROW_FACTORS * r)
                row_scale = part.spread(b, b.load(pointer(b, place, FLOAT), align=4))
                for scale, total in zip(scales, totals[r], strict=True):
                    factor = b.fmul(scale, row_scale)
                    sums[i] = part.fused(b, b.sitofp(total, part.floats), factor, sums[i])
                if minimum is not None:
                    place = pointer(b, _plus(b, place, 4), FLOAT)
                    row_sum = part.spread(b, b.load(place, align=4))
                    sums[i] = part.fused(b, minimum, row_sum, sums[i])
        return sums

    initial = [part.number(0.0) for part in parts for _ in range(count)]
    return _loop(b, num_groups, initial, add_group)


def _keep_loads_behind(builder: Any) -> None:
    """Emits no instruction. LLVM would load all of a group's inputs first, and store them again."""
    nothing = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])


def _group_totals(
    builder: Any, form: GroupFormat, count: int, inputs_at: Any, codes_at: Any, part: _Part
) -> list[list[Any]]:
    """Sums of a group's products, of each of its halves: int32, for each row."""
    b = builder
    totals: list[list[Any]] = [[] for _ in range(count)]
    for step, codes in enumerate(_codes(b, form, codes_at, part)):
        begins = step % (STEPS // form.halves) == 0
        if count > 1 and step % (4 * form.halves) == 0:
            _keep_loads_behind(b)
        for r, total in enumerate(totals):
            place = pointer(b, _plus(b, inputs_at, _ROW_CODES * r + 4 * step), INT32)
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
            request(b, _plus(b, record, _PREFETCHED_BYTES + offset))
        inputs_at = [b.add(row, b.mul(group, ir.Constant(INT64, 4 * GROUP))) for row in rows]
        totals = [constant(0.0)] * len(rows)
        for i in range(GROUP):
            weights = widened(b, types.uint8, _plus(b, record, head_bytes(form) + LANES * i))
            for r, inputs in enumerate(inputs_at):
                place = pointer(b, _plus(b, inputs, 4 * i), FLOAT)
                value = broadcast(b, b.load(place, align=4))
                totals[r] = fused(b, value, weights, totals[r])
        scale = b.load(pointer(b, record, FLOATS), align=4)
        scale = b.fmul(scale, constant(FP8_FACTOR))
        return [fused(b, total, scale, own) for total, own in zip(totals, sums, strict=True)]

    return _loop(b, num_groups, [constant(0.0)] * len(rows), add_group)


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
                together = [_PARTS] if rows == 1 else [[part] for part in _PARTS]
                for parts in [[_WHOLE]] if described.is_float else together:
                    if described.is_float:
                        own_rows = rows_at(x, x_row, rows)
                        sums = _multiply_floats(b, described, own_rows, w, num_groups)
                    else:
                        sums = _multiply(b, described, rows, first_row, panel, num_rows, w,
                                         num_groups, parts)  # fmt: skip
                    places = [_plus(b, place, 4 * part.first) for part in parts for place in outs]
                    for place, value in zip(places, sums, strict=True):
                        b.store(value, pointer(b, place, value.type), align=4)

            switch(b, count, range(1, TILES.max_group_rows + 1), emit)

        switch(b, form, list(_NAMES), emit_format)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), code


_NAMES = {number: name for name, number in NUMBERS.items()}


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
                record, inside, codes_at = _place(b, described, w, group)
                scales, minimum = _scales(b, described, record, inside, _WHOLE)
                own_scales = [b.extract_element(scale, lane) for scale in scales]
                # As the format has it: code - zero, then the product.
                zero = ir.Constant(INT32, 0 if described.halves == 2 else described.zero)
                if described.has_zeros:
                    zero = b.extract_element(_zeros(b, record, _WHOLE), lane)
                least = ir.Constant(FLOAT, -0.0)
                if described.has_minimum:
                    least = b.extract_element(minimum, lane)
                place = b.add(out, b.mul(group, ir.Constant(INT64, 4 * GROUP)))
                for step, codes in enumerate(_codes(b, described, codes_at, _WHOLE)):
                    scale = own_scales[step * described.halves // STEPS]
                    pair = b.extract_element(b.bitcast(codes, INTS), lane)
                    for i, number in enumerate(
                        (b.sext(b.trunc(pair, _SHORT), INT32), b.ashr(pair, ir.Constant(INT32, 16)))
                    ):
                        number = b.sub(number, zero)
                        value = b.call(fma, [b.sitofp(number, FLOAT), scale, least])
                        at = pointer(b, _plus(b, place, 8 * step + 4 * i), FLOAT)
                        b.store(b.fmul(value, factor), at, align=4)
                return []

            _loop(b, num_groups, [], write_group)

        switch(b, form, [n for n, name in _NAMES.items() if not FORMATS[name].is_float], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, types.int64), code


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
            to, at = _panel_places(b, panel, row, num_rows, group, num_groups)
            place = b.add(x, b.mul(group, ir.Constant(INT64, 4 * GROUP)))
            values = [
                b.load(pointer(b, _plus(b, place, 4 * LANES * i), FLOATS), align=4) for i in (0, 1)
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
                shorts = ir.VectorType(_SHORT, LANES)
                there = pointer(b, _plus(b, to, 2 * LANES * i), shorts)
                b.store(b.trunc(codes[i], shorts), there, align=2)
            total = b.sitofp(b.call(sum_of, [b.add(*codes)]), FLOAT)
            scale = b.fmul(largest, ir.Constant(FLOAT, 1.0 / _LARGEST))
            scale = b.select(is_finite, scale, ir.Constant(FLOAT, float("nan")))
            b.store(scale, pointer(b, at, FLOAT), align=4)
            b.store(b.fmul(scale, total), pointer(b, _plus(b, at, 4), FLOAT), align=4)
            return []

        _loop(b, num_groups, [], round_group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code
