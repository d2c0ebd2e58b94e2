"""Weights that are stored in groups of inputs.

A weight is scale * (code - zero) or scale * code + minimum, where a group of 32 inputs shares scale
and minimum (of Q6_K: 16). Formats with a Q are GGUF's; in those with a K, 8 groups share two
float16 factors, of which scales and minima are small multiples. Layouts:
https://github.com/ggml-org/ggml, `ggml-common.h`. The others are those of quantised safetensors
checkpoints (`quantized_tensors`); codes of FP8 are e4m3fn: 4 bits of exponent, 3 of mantissa.
MXFP4, which both have, is that of the Open Compute Project: codes are e2m1, a sign and 2 bits of
exponent and 1 of mantissa, and the scale is a power of two, stored as its exponent. Of a code's
value twice is a whole number, so half of the scale is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Kernels take constants from here.

GROUP = 32
"""Inputs of a group."""
SUPER_GROUPS = 8
"""Groups of a format with a K that share factors."""

Bytes = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFormat:
    """A type of weights.

    Attributes:
        bits: of a code.
        zero: the code of a weight of zero, where there are no minima.
        has_zeros: whether each group has its own such code; scales are float32 then.
        is_float: whether codes are FP8; scales are float32 then.
        has_minimum: whether groups have minima.
        is_super: whether scales are multiples of factors that 8 groups share.
        is_mx: whether codes are e2m1, and scales exponents.
        halves: how many scales a group has.
    """

    bits: int
    zero: int = 0
    has_zeros: bool = False
    is_float: bool = False
    has_minimum: bool = False
    is_super: bool = False
    is_mx: bool = False
    halves: int = 1

    @property
    def depth(self) -> int:
        """Inputs of a block of a GGUF file, elsewhere of a group."""
        return GROUP * SUPER_GROUPS if self.is_super else GROUP

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of a GGUF file."""
        factors = 1 if self.is_mx else 2 * (1 + self.has_minimum)
        scales = 0
        if self.is_super:
            scales = 12 if self.has_minimum else SUPER_GROUPS * self.halves
        return factors + scales + self.depth * self.bits // 8


FORMATS: Mapping[str, GroupFormat] = {
    "Q4_0": GroupFormat(bits=4, zero=8),
    "Q4_1": GroupFormat(bits=4, has_minimum=True),
    "Q5_0": GroupFormat(bits=5, zero=16),
    "Q5_1": GroupFormat(bits=5, has_minimum=True),
    "Q8_0": GroupFormat(bits=8),
    "Q4_K": GroupFormat(bits=4, has_minimum=True, is_super=True),
    "Q5_K": GroupFormat(bits=5, has_minimum=True, is_super=True),
    "Q6_K": GroupFormat(bits=6, zero=32, is_super=True, halves=2),
    "INT4": GroupFormat(bits=4, has_zeros=True),
    "INT8": GroupFormat(bits=8, has_zeros=True),
    "FP8": GroupFormat(bits=8, is_float=True),
    "MXFP4": GroupFormat(bits=4, is_mx=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """Rows [n, K] of a weight, taken apart. G = K / 32 groups, B = K / `depth` blocks."""

    # [n, K]; of 8 bits those of an int8, or of FP8.
    codes: Bytes
    # [n, B]: scales; of a format with a K what they are multiples of; of MXFP4 uint8.
    factors: npt.NDArray[Any]
    # [n, B] likewise, or None.
    minima: npt.NDArray[np.floating] | None = None
    # [n, G * halves] of a format with a K; of Q6_K the bits of an int8.
    scales: Bytes | None = None
    # [n, G] of a format with a K and minima; weights are scale * code - minimum there.
    minimum_scales: Bytes | None = None
    # [n, G]: codes of weights of zero, of a format that has them.
    zeros: npt.NDArray[np.int8] | None = None


def take_apart(name: str, rows: Bytes) -> GroupedRows:
    """Rows [n, bytes of a row] of a GGUF file's type, a key of `FORMATS`."""
    form = FORMATS[name]
    blocks = rows.reshape(len(rows), -1, form.block_bytes)
    if form.is_super:
        return _super(form, blocks)
    end = 2 * (1 + form.has_minimum)
    factors = blocks[..., 0].copy() if form.is_mx else _halves(blocks[..., :2])
    minima = _halves(blocks[..., 2:4]) if form.has_minimum else None
    codes = np.empty((*blocks.shape[:2], GROUP), dtype=np.uint8)
    if form.bits == 8:
        codes[...] = blocks[..., end:]
    else:
        low = blocks[..., -GROUP // 2 :]
        np.bitwise_and(low, 15, out=codes[..., : GROUP // 2])
        np.right_shift(low, 4, out=codes[..., GROUP // 2 :])
        if form.bits == 5:
            codes |= np.unpackbits(blocks[..., end : end + 4], axis=-1, bitorder="little") << 4
    return GroupedRows(
        codes=codes.reshape(len(rows), -1),
        factors=factors,
        minima=minima,
    )


def values_of(name: str, parts: GroupedRows) -> FloatArray:
    """The float32 values [n, K] of rows of a type."""
    form, num_rows = FORMATS[name], len(parts.codes)
    codes: npt.NDArray[Any] = parts.codes
    if form.is_float:
        codes = _FP8_VALUES[codes]
    elif form.is_mx:
        codes = _TWICE_E2M1[codes]
    elif form.bits == 8:
        codes = codes.view(np.int8)
    num_scales = codes.shape[1] // GROUP * form.halves
    values = codes.reshape(num_rows, num_scales, -1).astype(np.float32)
    values -= form.zero if parts.zeros is None else parts.zeros[..., None]
    # Each product is exact; only the last sum or product rounds.
    values *= group_scales(form, parts)[..., None]
    if (minima := group_minima(form, parts)) is not None:
        values += minima[..., None]
    return values.reshape(num_rows, -1)


def group_scales(form: GroupFormat, parts: GroupedRows) -> FloatArray:
    """The scales [n, G * halves] of groups; of MXFP4 half of each."""
    if form.is_mx:
        return _half_powers(parts.factors)
    return _multiplied(parts.factors, parts.scales, form)


def group_minima(form: GroupFormat, parts: GroupedRows) -> FloatArray | None:
    """What is added to weights, [n, G]; None: nothing."""
    if parts.minima is None:
        return None
    minima = _multiplied(parts.minima, parts.minimum_scales, form)
    return minima if parts.minimum_scales is None else -minima


def _fp8_values() -> FloatArray:
    """Of each code; NaN where nothing but the sign is 0."""
    codes = np.arange(256, dtype=np.uint8)
    # At their places in a float16, whose exponent's bias is 8 larger.
    halves = (codes.view(np.int8).astype(np.int16) << 7 & np.int16(-0x4080)).view(np.float16)
    return np.where(codes & 127 == 127, np.float32(np.nan), halves.astype(np.float32) * 256)


_FP8_VALUES = _fp8_values()
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes without a sign; those with one follow."""
TWICE_E2M1 = [int(2 * value * sign) for sign in (1, -1) for value in E2M1_VALUES]
_TWICE_E2M1 = np.array(TWICE_E2M1, dtype=np.int8)


def _half_powers(exponents: Bytes) -> FloatArray:
    """2 ** (e - 128)."""
    wide = exponents.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(1 << 21) << wide, (wide - 1) << 23)
    powers: FloatArray = bits.astype(np.uint32).view(np.float32)
    return powers


def _multiplied(factors: npt.NDArray[Any], scales: Bytes | None, form: GroupFormat) -> FloatArray:
    """Factors [n, B], times scales that share them, in float32."""
    result: FloatArray = factors.astype(np.float32)
    if scales is not None:
        numbers = scales.view(np.int8) if form.halves == 2 else scales
        result = np.repeat(result, scales.shape[1] // result.shape[1], axis=1) * numbers
    return result


def _super(form: GroupFormat, blocks: Bytes) -> GroupedRows:
    num_rows, num_blocks = blocks.shape[:2]
    shape = (num_rows, num_blocks, SUPER_GROUPS, GROUP)
    if not form.has_minimum:
        # Q6_K: low halves, two more bits, scales, factor.
        low, high = blocks[..., :128], blocks[..., 128:192]
        low = low.reshape(num_rows, num_blocks, 2, 2, GROUP)
        high = high.reshape(num_rows, num_blocks, 2, 1, GROUP)
        codes = np.empty((num_rows, num_blocks, 2, 4, GROUP), dtype=np.uint8)
        codes[..., :2, :] = low & 15
        codes[..., 2:, :] = low >> 4
        codes |= (high >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3) << 4
        return GroupedRows(
            codes=codes.reshape(num_rows, -1),
            factors=_halves(blocks[..., 208:]),
            scales=blocks[..., 192:208].reshape(num_rows, -1),
        )
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minimum_scales = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    low = blocks[..., -128:].reshape(num_rows, num_blocks, 4, 1, GROUP)
    codes = np.empty((num_rows, num_blocks, 4, 2, GROUP), dtype=np.uint8)
    codes[..., :1, :] = low & 15
    codes[..., 1:, :] = low >> 4
    codes = codes.reshape(shape)
    if form.bits == 5:
        high = blocks[..., 16:48].reshape(num_rows, num_blocks, 1, GROUP)
        codes |= (high >> np.arange(SUPER_GROUPS, dtype=np.uint8)[:, None] & 1) << 4
    return GroupedRows(
        codes=codes.reshape(num_rows, -1),
        factors=_halves(blocks[..., :2]),
        minima=_halves(blocks[..., 2:4]),
        scales=scales.reshape(num_rows, -1),
        minimum_scales=minimum_scales.reshape(num_rows, -1),
    )


def _halves(values: Bytes) -> npt.NDArray[np.float16]:
    """Float16s [n, B] of bytes [n, B, 2]."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(values).view("<f2")[..., 0]
    return halves
