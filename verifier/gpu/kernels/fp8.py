"""FP8 values and scales of rows, and what they become after a product; `verifier.gpu.fp8` explains
them.
"""

import triton
import triton.language as tl


@triton.jit
def quantise_rows_kernel(
    rows,  # [R, size]
    values,  # [R, size] FP8, written
    scales,  # [R] float32, written
    size,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest_of = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        numbers = tl.load(rows + row * size + first + at, mask=first + at < size, other=0.0)
        numbers = tl.abs(numbers.to(tl.float32))
        # A maximum may leave NaN out.
        numbers = tl.where(numbers < float("inf"), numbers, float("inf"))
        largest_of = tl.maximum(largest_of, numbers)
    largest = tl.max(largest_of, axis=0)
    # 448 = 1.75 * 2^8: with a larger mantissa, the sum carries into the exponent. Exponents are
    # biased by 127. 2^-80: a row of zeros gets a scale, too.
    bits = tl.maximum(largest, 8.271806125530277e-25).to(tl.int32, bitcast=True)
    exponent = ((bits + 0x1FFFFF) >> 23) - 8
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, tl.where(largest < float("inf"), scale, float("nan")))
    for first in range(0, size, BLOCK):
        inside = first + at < size
        numbers = tl.load(rows + row * size + first + at, mask=inside, other=0.0)
        scaled = (numbers.to(tl.float32) * inverse).to(tl.float8e4nv)
        tl.store(values + row * size + first + at, scaled, mask=inside)


@triton.jit
def rescale_kernel(
    product,  # [T, size] bfloat16
    row_scale,  # [T] float32
    scale,  # [size] float32
    bias,  # [size], if HAS_BIAS
    rescaled,  # [T, size], written
    size,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    numbers = tl.load(product + row * size + at, mask=inside, other=0.0).to(tl.float32)
    numbers *= tl.load(scale + at, mask=inside, other=0.0)
    numbers *= tl.load(row_scale + row)
    if HAS_BIAS:
        numbers += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(rescaled + row * size + at, numbers.to(rescaled.dtype.element_ty), mask=inside)
