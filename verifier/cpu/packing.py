"""Writes weights [N, K] into packed blocks, converted or quantised on the way.

A weight is read from its file in pieces of some rows, and each piece's pages leave this process's
memory after it, so loading takes the memory of the packed model and one piece.
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, grouped_pieces, pieces
from verifier.checkpoint.weight_types import LANES, BitsArray, FloatArray, WeightType, widened

# FP8 is e4m3fn: 4 bits of exponent with bias 7, 3 of mantissa, largest 448.
_FP8_LARGEST = 448.0
# A channel of zeros gets a scale, too.
_FP8_SMALLEST_CHANNEL = 2.0**-80
_FP8_SMALLEST_NORMAL = 2.0**-6


def pack_rows(
    files: TensorFiles,
    tensor: StoredTensor,
    first_row: int,
    num_rows: int,
    *,
    weight_type: WeightType,
    blocks: BitsArray,
    scales: FloatArray | None,
    rounded_to: WeightType | None,
) -> None:
    """Packs rows [first_row, first_row + num_rows) of a tensor [N, K] into the first blocks.

    Args:
        weight_type: what is stored in `blocks`.
        blocks: [at least num_rows / 16, at least K, 16], zero.
        scales: [at least num_rows], for FP8; set to the rows' factors.
        rounded_to: what weights are rounded to before they are quantised; None: they are FP8 in
            the file, with a factor for each row.
    """
    if rounded_to is None:
        assert scales is not None
        for start, parts in grouped_pieces(files, tensor, first_row, num_rows):
            scales[start : start + len(parts.codes)] = parts.factors[:, 0]
            codes: BitsArray = parts.codes
            _pack(codes, blocks[start // LANES :])
        return
    for start, rows in pieces(files, tensor, first_row, num_rows):
        if scales is None:
            bits = converted(rows, tensor.type, weight_type)
        else:
            values = widened(converted(rows, tensor.type, rounded_to), rounded_to)
            bits, scales[start : start + len(rows)] = to_fp8(values)
        # Kernels know no int16 and float32 apart from other types of that size.
        unsigned = np.dtype(f"u{bits.itemsize}")
        _pack(bits.view(unsigned), blocks[start // LANES :].view(unsigned))


def converted(bits: BitsArray, source: WeightType, target: WeightType) -> BitsArray:
    """Bits of one float type as those of another: rounded to the nearest, halves to even."""
    if source is target:
        return bits
    values = widened(bits, source)
    if target is WeightType.BFLOAT16:
        wide = values.view(np.uint32)
        rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
        # Adding to a NaN's bits might make it infinite.
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    if target is WeightType.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.int16)
    return values


def to_fp8(rows: FloatArray) -> tuple[BitsArray, FloatArray]:
    """Nearest e4m3fn weights, and a factor per row: the smallest power of two at which its largest
    weight fits. Same values as `verifier.gpu.fp8`.
    """
    largest = np.maximum(np.abs(rows).max(axis=1), np.float32(_FP8_SMALLEST_CHANNEL))
    mantissa, exponent = np.frexp(largest / np.float32(_FP8_LARGEST))
    scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    # So outputs of a row that is not finite are not, either.
    scale[~np.isfinite(largest)] = np.nan
    scaled = rows / scale[:, None]
    wide = scaled.view(np.uint32)
    magnitude = wide & 0x7FFFFFFF
    # The exponent's bias becomes 7 instead of 127; of 23 bits of mantissa, 3 stay.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = np.rint(np.abs(scaled) * np.float32(512)).astype(np.uint32)
    bits = np.where(np.abs(scaled) < _FP8_SMALLEST_NORMAL, small, normal)
    return (bits | (wide >> 24) & 0x80).astype(np.uint8), scale


@kernel
def _pack(rows: npt.NDArray[np.uint64], blocks: npt.NDArray[np.uint64]) -> None:
    """Rows [n, K] of some unsigned type into blocks [at least n / 16, at least K, 16]."""
    num_rows, depth = rows.shape
    for first in range(0, num_rows, 16):
        block = blocks[first // 16]
        lanes = min(16, num_rows - first)
        if lanes == 16:
            # Of a known length, so that it is unrolled.
            for k in range(depth):
                for lane in range(16):
                    block[k, lane] = rows[first + lane, k]
        else:
            for k in range(depth):
                for lane in range(lanes):
                    block[k, lane] = rows[first + lane, k]
