"""Reads rows of quantised weights, laid out as `quantized_tensors` says."""

from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.group_formats import FORMATS, GROUP, Bytes, GroupedRows
from verifier.checkpoint.quantized_tensors import Layout, QuantizedTensor, Read
from verifier.checkpoint.weight_types import widened

# Where each of eight outputs lies in an int32 of AWQ.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def quantized_rows(tensor: QuantizedTensor, first: int, count: int, read: Read) -> GroupedRows:
    """Rows [first, first + count), copied: kernels would be compiled again for read-only codes."""
    if tensor.layout is Layout.FP8:
        return _fp8_rows(tensor, first, count, read)
    if tensor.layout is Layout.MXFP4:
        return _mx_rows(tensor, first, count, read)
    rows = slice(first, first + count)
    bits = FORMATS[tensor.dtype].bits
    codes, scales = read(tensor.codes), widened(read(tensor.scales), tensor.scales.type)
    zeros = None if tensor.zeros is None else read(tensor.zeros)
    match tensor.layout:
        case Layout.PACKED:
            codes = _numbers(codes[rows], bits)
            zeros = None if zeros is None else _numbers(zeros.T, bits).T
        case Layout.BYTES:
            codes = codes[rows].view(np.uint8)
        case Layout.GPTQ:
            assert zeros is not None
            # As numbers that may carry, in which GPTQModel takes 1 from them.
            ones = np.uint32(tensor.zero_offset * (0xFFFFFFFF // ((1 << bits) - 1)))
            codes = _numbers(codes[:, rows].T, bits)
            scales, zeros = scales.T, _numbers(zeros.view(np.uint32) + ones, bits).T
        case Layout.AWQ:
            assert zeros is not None
            words = slice(first // 8, -(-(first + count) // 8))
            codes = _of_awq(codes[:, words]).T[first % 8 :][:count]
            scales, zeros = scales.T, _of_awq(zeros).T
    if zeros is None:
        zeros = np.full_like(scales, 8 if bits == 4 else 0, dtype=np.int8)
    repeats = tensor.shape[1] // GROUP // scales.shape[1]
    factors, zeros = (np.repeat(each[rows], repeats, axis=1) for each in (scales, zeros))
    return GroupedRows(
        codes=np.array(codes, order="C"),
        factors=np.ascontiguousarray(factors),
        zeros=np.ascontiguousarray(zeros).view(np.int8),
    )


def _fp8_rows(tensor: QuantizedTensor, first: int, count: int, read: Read) -> GroupedRows:
    codes = read(tensor.codes)[first : first + count].view(np.uint8)
    scales = widened(read(tensor.scales), tensor.scales.type)
    rows, columns = tensor.block
    scales = scales.reshape(-(-tensor.shape[0] // rows), -1)
    groups = np.arange(0, tensor.shape[1], GROUP)
    factors = scales[np.arange(first, first + count)[:, None] // rows, groups // columns]
    return GroupedRows(codes=np.array(codes, order="C"), factors=factors)


def _mx_rows(tensor: QuantizedTensor, first: int, count: int, read: Read) -> GroupedRows:
    codes, scales = (
        read(each).view(np.uint8)[tensor.first_row :: tensor.row_step][first : first + count]
        for each in (tensor.codes, tensor.scales)
    )
    return GroupedRows(codes=_numbers(codes.reshape(count, -1), 4), factors=np.array(scales))


def _of_awq(words: npt.NDArray[np.int32]) -> Bytes:
    """The numbers [a, b * 8] of int32s [a, b]."""
    stored = _numbers(words, 4).reshape(*words.shape, 8)
    return stored[..., _AWQ_PLACES].reshape(len(words), -1)


def _numbers(words: npt.NDArray[Any], bits: int) -> Bytes:
    """The numbers of int32s [a, b]: [a, b * 32 / bits], of 8 bits as those of an int8."""
    numbers: Bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return numbers ^ np.uint8(0x80)
    return np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(len(words), -1)
