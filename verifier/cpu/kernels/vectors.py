"""Vectors of 16 floats as values in kernels, in LLVM's own type.

Every operation is IEEE 754's, lane by lane, and is never fused, reordered or approximated by the
compiler. So a result has the same bits whether the processor has registers of 16 floats (AVX-512),
of 8 (AVX2) or of 4 (NEON).
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.extending import models, register_model

LANES = 16

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's decorator, untyped: kernels call the result without the typing context."""
    return extending.intrinsic(function)


class VectorType(types.Type):
    """Numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


VECTOR: Any = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)  # type: ignore[no-untyped-call]


def constant(value: float) -> Any:
    """LLVM's constant with `value` in all lanes, rounded to float32."""
    return ir.Constant(FLOATS, [value] * LANES)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An LLVM pointer to `kind` at an int64 address."""
    return builder.inttoptr(address, kind.as_pointer())


def declared(
    builder: Any, name: str, num_arguments: int, argument: Any = FLOATS, result: Any = FLOATS
) -> Any:
    """LLVM's intrinsic function `name` from `num_arguments` values of a type to one of another."""
    known = builder.module.globals.get(name)
    if known is not None:
        return known
    return ir.Function(builder.module, ir.FunctionType(result, [argument] * num_arguments), name)


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The value of x * y + z, rounded once."""
    return builder.call(declared(builder, "llvm.fma.v16f32", 3), [x, y, z])


def broadcast(builder: Any, value: Any) -> Any:
    """The scalar in all lanes."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


def exponential(builder: Any, x: Any) -> Any:
    """exp(x) within 2 units in the last place; 0 below -87.3, e^88.3 above 88.3, NaN for NaN.

    x = n ln 2 + r with |r| <= ln(2) / 2, and exp(r) by its Taylor polynomial of degree 7.
    """
    low, high = constant(-87.33), constant(88.3)
    bounded = builder.select(builder.fcmp_ordered(">=", x, low), x, low)
    bounded = builder.select(builder.fcmp_ordered("<=", bounded, high), bounded, high)
    rounded = builder.call(
        declared(builder, "llvm.rint.v16f32", 1),
        [builder.fmul(bounded, constant(1.0 / math.log(2.0)))],
    )
    # ln 2 in two parts: the product of n and the first is exact.
    rest = fused(builder, rounded, constant(-0.693359375), bounded)
    rest = fused(builder, rounded, constant(2.12194440e-4), rest)
    power = constant(1.0 / math.factorial(7))
    for degree in range(6, -1, -1):
        power = fused(builder, power, rest, constant(1.0 / math.factorial(degree)))
    exponent = builder.add(builder.fptosi(rounded, INTS), ir.Constant(INTS, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS)
    result = builder.fmul(power, scale)
    result = builder.select(builder.fcmp_ordered("<", x, low), constant(0.0), result)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def hyperbolic_tangent(builder: Any, x: Any) -> Any:
    """tanh(x) = 1 - 2 / (exp(2 x) + 1), within 2e-7."""
    power = exponential(builder, builder.fadd(x, x))
    return builder.fsub(
        constant(1.0), builder.fdiv(constant(2.0), builder.fadd(power, constant(1.0)))
    )


def _operation(generate: Callable[..., Any], num_arguments: int) -> Any:
    """A kernel's function from vectors to a vector."""

    def typed(typing_context: Any, *arguments: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return generate(builder, *values)

        return VECTOR(*[VECTOR] * num_arguments), code

    # numba reads the number of arguments from the signature.
    if num_arguments == 1:
        return intrinsic(lambda typing_context, x: typed(typing_context, x))
    if num_arguments == 2:
        return intrinsic(lambda typing_context, x, y: typed(typing_context, x, y))
    return intrinsic(lambda typing_context, x, y, z: typed(typing_context, x, y, z))


add = _operation(lambda builder, x, y: builder.fadd(x, y), 2)
subtract = _operation(lambda builder, x, y: builder.fsub(x, y), 2)
multiply = _operation(lambda builder, x, y: builder.fmul(x, y), 2)
divide = _operation(lambda builder, x, y: builder.fdiv(x, y), 2)
# The larger lane by lane; y if either is NaN.
maximum = _operation(lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y), 2)
multiply_add = _operation(fused, 3)
exp = _operation(exponential, 1)
tanh = _operation(hyperbolic_tangent, 1)


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """The 16 floats at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], FLOATS), align=4)

    return VECTOR(types.int64), code


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes 16 floats to an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR), code


@intrinsic
def fill(typing_context: Any, value: Any) -> Any:
    """The float32 in all lanes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return broadcast(builder, arguments[0])

    return VECTOR(types.float32), code


def reduced(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines a vector's lanes in pairs: 0 and 1, 2 and 3, ..."""
    lanes = [builder.extract_element(vector, ir.Constant(INT32, i)) for i in range(LANES)]
    while len(lanes) > 1:
        lanes = [combine(x, y) for x, y in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


def _reduction(combine: Callable[..., Any]) -> Any:
    """A function from a vector to a float32."""

    def typed(typing_context: Any, x: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return reduced(builder, arguments[0], lambda x, y: combine(builder, x, y))

        return types.float32(VECTOR), code

    return intrinsic(typed)


sum_of = _reduction(lambda builder, x, y: builder.fadd(x, y))
largest_of = _reduction(lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))
