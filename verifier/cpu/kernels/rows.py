"""What a layer does with single rows: norms, rotary embedding, gates; and the K/V that it writes.

Addresses are in bytes; rows are contiguous floats.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from servicekit.kernels.jit import kernel
from verifier.cpu.kernels import vectors
from verifier.cpu.kernels.tiles import widened
from verifier.cpu.kernels.vectors import FLOAT, INT32, VECTOR, intrinsic, pointer

_SILU, _CLAMPED = 0, 2


@intrinsic
def load_f32(typing_context: Any, address: Any) -> Any:
    """The float32 at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], FLOAT), align=4)

    return types.float32(types.int64), code


@intrinsic
def store_f32(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes a float32 to an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), code


@intrinsic
def load_weights(typing_context: Any, marker: Any, address: Any) -> Any:
    """16 weights at an address, as floats."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return widened(builder, marker.dtype, arguments[1])

    return VECTOR(marker, types.int64), code


@intrinsic
def _store_rounded(typing_context: Any, marker: Any, address: Any, value: Any) -> Any:
    """Writes a finite float32 as the marker's type, rounded to nearest, ties to even."""
    kind = marker.dtype

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, address, value = arguments
        b = builder
        if kind == types.float32:
            b.store(value, pointer(b, address, FLOAT), align=4)
        elif kind == types.int16:
            b.store(b.fptrunc(value, ir.HalfType()), pointer(b, address, ir.HalfType()), align=2)
        else:
            bits = b.bitcast(value, INT32)
            last = b.and_(b.lshr(bits, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
            rounded = b.add(b.add(bits, ir.Constant(INT32, 0x7FFF)), last)
            short = ir.IntType(16)
            stored = b.trunc(b.lshr(rounded, ir.Constant(INT32, 16)), short)
            b.store(stored, pointer(b, address, short), align=2)
        return context.get_dummy_value()

    return types.void(marker, types.int64, types.float32), code


@intrinsic
def _load_widened(typing_context: Any, marker: Any, address: Any) -> Any:
    """One value of the marker's type (float32, bfloat16 or float16) at an address."""
    kind = marker.dtype

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        b, address = builder, arguments[1]
        if kind == types.float32:
            return b.load(pointer(b, address, FLOAT), align=4)
        if kind == types.int16:
            return b.fpext(b.load(pointer(b, address, ir.HalfType()), align=2), FLOAT)
        bits = b.zext(b.load(pointer(b, address, ir.IntType(16)), align=2), INT32)
        return b.bitcast(b.shl(bits, ir.Constant(INT32, 16)), FLOAT)

    return types.float32(marker, types.int64), code


@kernel
def embed(
    marker: npt.NDArray[Any], out: int, weights: int, is_packed: int, token: int, size: int,
    scale: Any,
) -> None:  # fmt: skip
    """The token's embedding times `scale`.

    Args:
        weights: address of [V, size], or if packed of [V / 16, size, 16].
    """
    itemsize = marker.itemsize
    if is_packed:
        first = weights + (token // 16 * size * 16 + token % 16) * itemsize
        for i in range(size):
            store_f32(out + 4 * i, _load_widened(marker, first + 16 * itemsize * i) * scale)
        return
    scales = vectors.fill(np.float32(scale))
    for i in range(0, size, 16):
        value = load_weights(marker, weights + (token * size + i) * itemsize)
        vectors.store(out + 4 * i, vectors.multiply(value, scales))


@kernel
def copy(to: int, source: int, size: int) -> None:
    """Copies floats [size]."""
    for offset in range(0, 4 * size, 64):
        vectors.store(to + offset, vectors.load(source + offset))


@kernel
def scale(x: int, size: int, factor: Any) -> None:
    """Multiplies floats [size], in place."""
    factors = vectors.fill(factor)
    for offset in range(0, 4 * size, 64):
        vectors.store(x + offset, vectors.multiply(vectors.load(x + offset), factors))


@kernel
def multiply_by_sigmoid(x: int, gates: int, size: int) -> None:
    """Multiplies floats [size], in place, by the sigmoid of others."""
    one, zero = vectors.fill(np.float32(1.0)), vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        below = vectors.exp(vectors.subtract(zero, vectors.load(gates + offset)))
        value = vectors.divide(vectors.load(x + offset), vectors.add(one, below))
        vectors.store(x + offset, value)


@kernel
def sigmoid_of_product(x: int, weights: int, size: int) -> Any:
    """The sigmoid of the product of two vectors of floats [size], added up as norms are."""
    total = vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        total = vectors.multiply_add(
            vectors.load(x + offset), vectors.load(weights + offset), total
        )
    below = vectors.exp(vectors.fill(np.float32(0.0) - vectors.sum_of(total)))
    return np.float32(1.0) / (np.float32(1.0) + vectors.largest_of(below))


@kernel
def norm(out: int, x: int, weight: int, size: int, eps: Any) -> None:
    """X / sqrt(mean(x * x) + eps) * weight. `out` may be `x`."""
    squares = vectors.fill(np.float32(0.0))
    for offset in range(0, 4 * size, 64):
        value = vectors.load(x + offset)
        squares = vectors.multiply_add(value, value, squares)
    mean = vectors.sum_of(squares) / np.float32(size)
    factor = vectors.fill(np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
    for offset in range(0, 4 * size, 64):
        value = vectors.multiply(vectors.load(x + offset), factor)
        vectors.store(out + offset, vectors.multiply(value, vectors.load(weight + offset)))


@kernel
def cos_sin(cos: int, sin: int, position: int, inv_freq: int, num_pairs: int, scaling: Any) -> None:
    """Cos and sin [num_pairs] of a rotary embedding at a position."""
    for i in range(num_pairs):
        # As transformers: the angle is rounded to float32.
        angle = np.float64(np.float32(position) * load_f32(inv_freq + 4 * i))
        store_f32(cos + 4 * i, np.float32(math.cos(angle)) * np.float32(scaling))
        store_f32(sin + 4 * i, np.float32(math.sin(angle)) * np.float32(scaling))


@kernel
def rotate(out: int, x: int, cos: int, sin: int, num_pairs: int, size: int) -> None:
    """A head [size], its first `num_pairs` dimensions rotated with the `num_pairs` that follow.
    `out` must not overlap `x`.
    """
    half = 4 * num_pairs
    whole = half // 64 * 64
    for offset in range(0, whole, 64):
        c, s = vectors.load(cos + offset), vectors.load(sin + offset)
        first, second = vectors.load(x + offset), vectors.load(x + half + offset)
        vectors.store(
            out + offset,
            vectors.subtract(vectors.multiply(first, c), vectors.multiply(second, s)),
        )
        vectors.store(
            out + half + offset,
            vectors.add(vectors.multiply(second, c), vectors.multiply(first, s)),
        )
    for offset in range(whole, half, 4):
        c, s = load_f32(cos + offset), load_f32(sin + offset)
        first, second = load_f32(x + offset), load_f32(x + half + offset)
        store_f32(out + offset, first * c - second * s)
        store_f32(out + half + offset, second * c + first * s)
    for offset in range(2 * half, 4 * size, 4):
        store_f32(out + offset, load_f32(x + offset))


@kernel
def write_kv(
    marker: npt.NDArray[Any], keys: int, values: int, offset: int, key: int, value: int, size: int,
    limit: Any,
) -> bool:  # fmt: skip
    """Stores a head's key and value at their place in a block of 16 tokens.

    What is not finite in the cache's type is stored as zero: attention multiplies hidden values by
    zero, and 0 * NaN would spread one sequence's failure to another.

    Args:
        keys, values: addresses of the block's [size, 16] and [size / 16, 16, 16].
        offset: the token's place in the block.
        key, value: addresses of [size] floats.
        limit: the largest float32 that is finite in the cache's type.

    Returns:
        Whether all were finite.
    """
    itemsize = marker.itemsize
    is_finite = True
    zero = np.float32(0.0)
    for i in range(size):
        x = load_f32(key + 4 * i)
        if not abs(x) <= limit:
            x, is_finite = zero, False
        _store_rounded(marker, keys + (16 * i + offset) * itemsize, x)
    for i in range(size):
        x = load_f32(value + 4 * i)
        if not abs(x) <= limit:
            x, is_finite = zero, False
        place = (i // 16 * 16 + offset) * 16 + i % 16
        _store_rounded(marker, values + place * itemsize, x)
    return is_finite


@kernel
def gate(out: int, gates: int, ups: int, size: int, activation: int) -> None:
    """activation(gate) * up, of `size` floats, a multiple of 16."""
    one = vectors.fill(np.float32(1.0))
    if activation == _SILU:
        zero = vectors.fill(np.float32(0.0))
        for offset in range(0, 4 * size, 64):
            x = vectors.load(gates + offset)
            below = vectors.add(one, vectors.exp(vectors.subtract(zero, x)))
            value = vectors.multiply(vectors.divide(x, below), vectors.load(ups + offset))
            vectors.store(out + offset, value)
        return
    if activation == _CLAMPED:
        zero, lowest = vectors.fill(np.float32(0.0)), vectors.fill(np.float32(-7.0))
        slope = vectors.fill(np.float32(-1.702))
        for offset in range(0, 4 * size, 64):
            # The smaller of two as the larger of their opposites. NaN stays: it is the second one.
            x = vectors.maximum(lowest, vectors.subtract(zero, vectors.load(gates + offset)))
            x = vectors.subtract(zero, x)
            up = vectors.maximum(lowest, vectors.load(ups + offset))
            up = vectors.subtract(zero, vectors.maximum(lowest, vectors.subtract(zero, up)))
            below = vectors.add(one, vectors.exp(vectors.multiply(slope, x)))
            value = vectors.multiply(vectors.divide(x, below), vectors.add(up, one))
            vectors.store(out + offset, value)
        return
    half = vectors.fill(np.float32(0.5))
    cubic = vectors.fill(np.float32(0.044715))
    root = vectors.fill(np.float32(math.sqrt(2.0 / math.pi)))
    for offset in range(0, 4 * size, 64):
        x = vectors.load(gates + offset)
        cube = vectors.multiply(vectors.multiply(x, x), x)
        inner = vectors.multiply(root, vectors.multiply_add(cubic, cube, x))
        value = vectors.multiply(vectors.multiply(half, x), vectors.add(one, vectors.tanh(inner)))
        vectors.store(out + offset, vectors.multiply(value, vectors.load(ups + offset)))
