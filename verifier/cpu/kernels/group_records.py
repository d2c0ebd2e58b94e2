"""Weights in groups, as the kernels read them: a block's records, their codes and their scales.

A block of weights has 16 outputs side by side, and for each of its K / 32 groups the codes of two
inputs of 16 outputs as 32 numbers, 16 times. Codes of 4 bits are the quarters of int16 numbers;
their higher bits follow. A record is the factors of a block of the file, then its groups' codes.

FP8 has no integers: a record is 16 scales, then for each input 16 codes.
"""

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from verifier.checkpoint.group_formats import (
    FORMATS,
    GROUP,
    SUPER_GROUPS,
    TWICE_E2M1,
    GroupFormat,
)
from verifier.cpu.kernels.vectors import FLOAT, INT32, INT64, LANES, declared, pointer
from verifier.cpu.processor import TILES

# Kernels take constants from here.

PLAIN_FLOAT32, PLAIN_BFLOAT16, PLAIN_FLOAT16 = 0, -1, -2
"""The numbers of weights that are not in groups."""
NUMBERS = {name: number for number, name in enumerate(FORMATS, start=1)}
"""The number of each format in a table of parts."""
FP8 = NUMBERS["FP8"]

STEPS = GROUP // 2
_CODE_VECTORS = 64

_BYTE, _SHORT, _HALF = ir.IntType(8), ir.IntType(16), ir.HalfType()


class Part:
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
        place = plus(builder, address, {FLOAT: 4, _HALF: 2, _BYTE: 1}[kind] * self.first)
        vector = ir.VectorType(kind, self.count)
        return builder.load(pointer(builder, place, vector), align=1)

    def load_shorts(self, builder: Any, address: Any) -> Any:
        """As `load`, of two int16 of each output."""
        place = plus(builder, address, 4 * self.first)
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


WHOLE = Part(0, LANES)
PARTS = [Part(first, TILES.group_outputs) for first in range(0, LANES, TILES.group_outputs)]
"""Outputs whose sums fit in registers beside each other."""


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


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(INT64, offset)) if offset else address


def locate(builder: Any, form: GroupFormat, block: Any, group: Any) -> tuple[Any, Any, Any]:
    """Of group number `group` of a block: its record, its number there, its codes."""
    b = builder
    per_record = form.depth // GROUP
    shift = per_record.bit_length() - 1
    number = b.lshr(group, ir.Constant(INT64, shift))
    inside = b.and_(group, ir.Constant(INT64, per_record - 1))
    record = b.add(block, b.mul(number, ir.Constant(INT64, record_bytes(form))))
    codes = b.add(record, b.mul(inside, ir.Constant(INT64, group_bytes(form))))
    return record, inside, plus(b, codes, head_bytes(form))


def load_codes(builder: Any, form: GroupFormat, group: Any, part: Part) -> Iterator[Any]:
    """Codes of the group at an address, as int16: two inputs of each output."""
    b = builder
    if form.is_mx:
        yield from _e2m1_codes(b, group, part)
        return
    if form.bits == 8:
        kind = ir.VectorType(_BYTE, 2 * part.count)
        for step in range(STEPS):
            place = pointer(b, plus(b, group, 2 * (LANES * step + part.first)), kind)
            yield b.sext(b.load(place, align=1), part.shorts)
        return
    quarters: Any = None
    high: Any = None
    extra = form.bits - 4
    for step in range(STEPS):
        if step % 4 == 0:
            place = plus(b, group, _CODE_VECTORS * (step // 4))
            quarters = part.load_shorts(b, place)
        codes = b.lshr(quarters, part.pairs(4 * (step % 4))) if step % 4 else quarters
        if step % 4 < 3:
            codes = b.and_(codes, part.pairs(15))
        if extra:
            per_vector = STEPS // extra
            if step % per_vector == 0:
                place = plus(b, group, _CODE_VECTORS * (4 + step // per_vector))
                high = part.load_shorts(b, place)
            shift = extra * (step % per_vector) - 4
            moved = (
                b.lshr(high, part.pairs(shift)) if shift >= 0 else b.shl(high, part.pairs(-shift))
            )
            codes = b.or_(codes, b.and_(moved, part.pairs(((1 << extra) - 1) << 4)))
        if form.halves == 2:
            codes = b.sub(codes, part.pairs(form.zero))
        yield codes


def _e2m1_codes(builder: Any, group: Any, part: Part) -> Iterator[Any]:
    """As `codes`, of MXFP4: twice the values of codes."""
    b = builder
    for vector in range(STEPS // 4):
        place = plus(b, group, _CODE_VECTORS * vector)
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


def load_zeros(builder: Any, record: Any, part: Part) -> Any:
    """The zeros of a group, as int32."""
    b = builder
    return b.sext(part.load(b, plus(b, record, 4 * LANES), _BYTE), part.ints)


def load_scales(
    builder: Any, form: GroupFormat, record: Any, group: Any, part: Part
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
        return [scale], b.fmul(negated, b.sitofp(load_zeros(b, record, part), part.floats))

    def factors(offset: int) -> Any:
        return b.fpext(part.load(b, plus(b, record, offset), _HALF), part.floats)

    def multiples(index: int, is_signed: bool) -> Any:
        per_group = (form.halves + form.has_minimum) * LANES
        place = b.add(record, b.mul(group, ir.Constant(INT64, per_group)))
        place = plus(b, place, 2 * LANES * (1 + form.has_minimum) + LANES * index)
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


def over_groups(
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
