"""The float64 functions of one token: its noise and its weight, with the host's bits.

`verifier/sampling/philox.py` and `distribution.py` say why these bits; the tests compare.
"""

import triton.language as tl

from verifier.gpu.sampling.kernels.jit import jit

_BITS_OF_1 = tl.constexpr(0x3FF0000000000000)
_SMALLEST = tl.constexpr(-708.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
_ROUNDER = tl.constexpr(6755399441055744.0)


@jit
def uniform(token_ids, position, seed):
    """Uniform variates in (0, 1), float64.

    Args:
        token_ids: [n] int32. position, seed: int64; of the seed, the bits count.
    """
    zero = token_ids * 0
    words_0, words_1, _, _ = tl.philox(seed, token_ids, zero + position.to(tl.int32), zero, zero)
    bits = (words_0.to(tl.uint64) << 20) | (words_1.to(tl.uint64) >> 12)
    return (bits | _BITS_OF_1).to(tl.float64, bitcast=True) - 1.0 + 1.1102230246251565e-16


@jit
def exponential(values):
    """The exponential of float64 values that are not positive; the polynomial of the host."""
    x = tl.where(values > _SMALLEST, values, _SMALLEST)
    rounded = x * _LOG2_E + _ROUNDER
    k = rounded - _ROUNDER
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    y = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    y = y * r + 1.0 / 39916800.0
    y = y * r + 1.0 / 3628800.0
    y = y * r + 1.0 / 362880.0
    y = y * r + 1.0 / 40320.0
    y = y * r + 1.0 / 5040.0
    y = y * r + 1.0 / 720.0
    y = y * r + 1.0 / 120.0
    y = y * r + 1.0 / 24.0
    y = y * r + 1.0 / 6.0
    y = y * r + 0.5
    y = y * r * r + r + 1.0
    power = ((rounded.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(values > _SMALLEST, y * power, 0.0)
