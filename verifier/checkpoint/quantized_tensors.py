"""Quantised linear layers of safetensors files: each as one weight [N, K] of several tensors.

A weight is scale * (code - zero) in float32. Layouts, of codes of b bits and G groups of inputs;
int32 hold their numbers from the lowest bits up:

    PACKED  weight_packed int32 [N, K * b / 32], weight_scale [N, G], weight_shape: N, K;
            weight_zero_point int32 [N * b / 32, G] (packed by N). Numbers are larger by 2^(b - 1)
    BYTES   weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G]

compressed-tensors has both (https://github.com/vllm-project/compressed-tensors). Without zero
points, 0 is the zero.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.group_formats import GROUP, Bytes, GroupedRows
from verifier.checkpoint.quantization_config import Quantization
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import WEIGHT_TYPES, StoredTensor
from verifier.checkpoint.weight_types import widened

Read = Callable[[StoredTensor], npt.NDArray[Any]]
"""A tensor's values; of float types their bits."""


class Layout(enum.Enum):
    """By the names of codes, scales, zeros, and groups of the inputs."""

    PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    BYTES = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")


_SHAPE = "weight_shape"
_FORMATS = {4: "INT4", 8: "INT8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A weight [N, K]. `dtype` is a key of `FORMATS`; its place is that of the codes."""

    layout: Layout
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None


def joined(
    tensors: Mapping[str, StoredTensor], quantization: Quantization, read: Read
) -> dict[str, StoredTensor]:
    """The tensors, with one weight in place of those of each quantised layer.

    Raises:
        CheckpointError: they are not what the configuration says.
    """
    result = dict(tensors)
    for codes in tensors.values():
        module, _, own = codes.name.rpartition(".")
        layout = next((layout for layout in Layout if layout.value[0] == own), None)
        if layout is None or (layout is Layout.BYTES and codes.dtype != "I8"):
            continue
        *parts, told_shape = (
            result.pop(f"{module}.{name}", None) for name in (*layout.value, _SHAPE)
        )
        weight = f"{module}.weight"
        if weight in result:
            raise CheckpointError(f"{codes.file}: {weight}: is there beside {codes.name}")
        result[weight] = _weight(weight, layout, parts, told_shape, quantization, read)
    if not any(isinstance(tensor, QuantizedTensor) for tensor in result.values()):
        raise CheckpointError(f"there are no weights of the quant_method {quantization.method}")
    return result


def _weight(
    name: str,
    layout: Layout,
    parts: list[StoredTensor | None],
    told_shape: StoredTensor | None,
    quantization: Quantization,
    read: Read,
) -> QuantizedTensor:
    codes, scales, zeros, indices = parts
    assert codes is not None
    for bits, group_size in quantization.schemes:
        if len(codes.shape) != 2 or 0 in codes.shape or scales is None:
            break
        size, depth = _shape(layout, codes.shape, bits)
        group_size = group_size or depth
        needed = _needed(layout, bits, size=size, depth=depth, num_groups=depth // group_size)
        if (
            depth % group_size
            or not all(map(_fits, (codes, scales, zeros), needed))
            or (told_shape is not None and read(told_shape).tolist() != [size, depth])
        ):
            continue
        if depth % GROUP:
            raise CheckpointError(
                f"{codes.file}: {name}: {depth} inputs are no multiple of {GROUP}"
            )
        if indices is not None and (
            indices.shape != (depth,) or (read(indices) != np.arange(depth) // group_size).any()
        ):
            raise CheckpointError(
                f"{codes.file}: {indices.name}: inputs in another order than their groups "
                "(actorder, desc_act) are not served"
            )
        return QuantizedTensor(
            name=name,
            dtype=_FORMATS[bits],
            shape=(size, depth),
            start=codes.start,
            end=codes.end,
            file=codes.file,
            layout=layout,
            codes=codes,
            scales=scales,
            zeros=zeros,
        )
    schemes = " or ".join(
        f"{bits} bits in groups of {'a row' if group is None else group}"
        for bits, group in sorted(quantization.schemes, key=str)
    )
    raise CheckpointError(
        f"{codes.file}: {codes.name}: it is not of {schemes}, or a tensor beside it is missing or "
        "has another shape or type"
    )


def _shape(layout: Layout, shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """N and K of codes [a, b]."""
    return shape[0], shape[1] * (32 // bits if layout is Layout.PACKED else 1)


def _needed(
    layout: Layout, bits: int, *, size: int, depth: int, num_groups: int
) -> list[tuple[tuple[str, ...], tuple[int, int]]]:
    """Types and shapes of codes, scales and zeros."""

    def packed(number: int) -> int:
        return -(-number * bits // 32)

    floats = tuple(WEIGHT_TYPES)
    if layout is Layout.BYTES:
        return [
            (("I8",), (size, depth)),
            (floats, (size, num_groups)),
            (("I8",), (size, num_groups)),
        ]
    return [
        (("I32",), (size, packed(depth))),
        (floats, (size, num_groups)),
        (("I32",), (packed(size), num_groups)),
    ]


def _fits(tensor: StoredTensor | None, needed: tuple[tuple[str, ...], tuple[int, int]]) -> bool:
    return tensor is None or (tensor.dtype in needed[0] and tensor.shape == needed[1])


def quantized_rows(tensor: QuantizedTensor, first: int, count: int, read: Read) -> GroupedRows:
    """Rows [first, first + count)."""
    rows = slice(first, first + count)
    bits = 4 if tensor.dtype == _FORMATS[4] else 8
    codes, scales = read(tensor.codes), widened(read(tensor.scales), tensor.scales.type)
    zeros = None if tensor.zeros is None else read(tensor.zeros)
    if tensor.layout is Layout.PACKED:
        codes = _numbers(codes[rows], bits)
        zeros = None if zeros is None else _numbers(zeros.T, bits).T
    else:
        codes = codes[rows].view(np.uint8)
    if zeros is None:
        zeros = np.full_like(scales, 8 if bits == 4 else 0, dtype=np.int8)
    repeats = tensor.shape[1] // GROUP // scales.shape[1]
    factors, zeros = (np.repeat(each[rows], repeats, axis=1) for each in (scales, zeros))
    return GroupedRows(
        codes=np.ascontiguousarray(codes), factors=factors, zeros=zeros.view(np.int8)
    )


def _numbers(words: npt.NDArray[np.int32], bits: int) -> Bytes:
    """The numbers of int32s [a, b]: [a, b * 32 / bits], of 8 bits as those of an int8."""
    numbers: Bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return numbers ^ np.uint8(0x80)
    return np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(len(words), -1)
