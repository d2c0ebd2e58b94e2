"""Quantised linear layers of safetensors files: each as one weight [N, K] of several tensors.

A weight is scale * (code - zero) in float32. Layouts, of codes of b bits and G groups of inputs;
int32 hold their numbers from the lowest bits up:

    PACKED  weight_packed int32 [N, K * b / 32], weight_scale [N, G], weight_shape: N, K;
            weight_zero_point int32 [N * b / 32, G] (packed by N). Numbers are larger by 2^(b - 1)
    BYTES   weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G]
    GPTQ    qweight int32 [K * b / 32, N] (packed by K), scales [G, N], qzeros int32
            [G, N * b / 32]: less 1, unless the configuration says gptq_v2
    FP8     weight float8_e4m3fn [N, K], and one of weight_scale, weight_scale_inv: of one number,
            [N, 1], or [N / a, K / b] for blocks [a, b], whose last ones may be cut
    AWQ     qweight int32 [K, N / 8], scales [G, N], qzeros int32 [G, N / 8]; of 4 bits, of each
            eight in the order 0 2 4 6 1 3 5 7

Without zero points, 0 is the zero. MXFP4 is in `fused_experts`. compressed-tensors has the first
two, and FP8:
https://github.com/vllm-project/compressed-tensors. GPTQ:
https://github.com/ModelCloud/GPTQModel. AWQ: https://github.com/casper-hansen/AutoAWQ, version
gemm.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.group_formats import GROUP
from verifier.checkpoint.quantization_config import Quantization
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import WEIGHT_TYPES, StoredTensor

Read = Callable[[StoredTensor], npt.NDArray[Any]]
"""A tensor's values; of float types their bits."""


class Layout(enum.Enum):
    """How a weight is stored, as the header says."""

    PACKED = enum.auto()
    BYTES = enum.auto()
    GPTQ = enum.auto()
    AWQ = enum.auto()
    FP8 = enum.auto()
    MXFP4 = enum.auto()


_OF_COMPRESSED = ("weight_scale", "weight_zero_point", "weight_g_idx")
_OF_GPTQ = ("qweight", "scales", "qzeros", "g_idx")
# The names of codes, scales, zeros, and groups of the inputs.
_NAMES = {
    Layout.PACKED: ("weight_packed", *_OF_COMPRESSED),
    Layout.BYTES: ("weight", *_OF_COMPRESSED),
    Layout.GPTQ: _OF_GPTQ,
    Layout.AWQ: _OF_GPTQ,
    Layout.FP8: ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
}
_CODE_TYPES = {Layout.BYTES: "I8", Layout.FP8: "F8_E4M3"}
# Whose tensors have an input's numbers, or those of a group of inputs, in a row.
_BY_INPUTS = (Layout.GPTQ, Layout.AWQ)
_SHAPE = "weight_shape"
_FORMATS = {4: "INT4", 8: "INT8"}
_LAYOUTS = {
    "compressed-tensors": (Layout.PACKED, Layout.BYTES, Layout.FP8),
    "fp8": (Layout.FP8,),
    "gptq": (Layout.GPTQ,),
    "awq": (Layout.AWQ,),
    # Of `fused_experts`.
    "mxfp4": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor(StoredTensor):
    """A weight [N, K]. `dtype` is a key of `FORMATS`; its place is that of the codes."""

    layout: Layout
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    # By how much zeros are larger than they are stored.
    zero_offset: int = 0
    # Of FP8, rows and columns that share a scale.
    block: tuple[int, int] = (1, 1)

    @property
    def group_size(self) -> int:
        """How many inputs share a scale."""
        if self.layout is Layout.MXFP4:
            return GROUP
        if self.layout is Layout.FP8:
            return min(self.block[1], self.shape[1])
        return math.prod(self.shape) // math.prod(self.scales.shape)

    @property
    def has_row_scales(self) -> bool:
        """Whether all inputs of an output share a scale of FP8."""
        return self.layout is Layout.FP8 and self.block[1] == self.shape[1]


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
        layouts = _LAYOUTS[quantization.method]
        layout = next(
            (
                layout
                for layout in layouts
                if _NAMES[layout][0] == own and codes.dtype == _CODE_TYPES.get(layout, codes.dtype)
            ),
            None,
        )
        if layout is None:
            continue
        *parts, told_shape = (
            result.pop(f"{module}.{name}", None) for name in (*_NAMES[layout], _SHAPE)
        )
        weight = f"{module}.weight"
        if weight in result:
            raise CheckpointError(f"{codes.file}: {weight}: is there beside {codes.name}")
        if layout is Layout.FP8:
            result[weight] = _fp8_weight(codes, parts[1] or parts[2], quantization)
            continue
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
            or (zeros is None and layout in _BY_INPUTS)
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
            zero_offset=quantization.zero_offset,
            is_by_columns=layout in _BY_INPUTS,
        )
    schemes = " or ".join(
        f"{bits} bits in groups of {'a row' if group is None else group}"
        for bits, group in sorted(quantization.schemes, key=str)
    )
    raise CheckpointError(
        f"{codes.file}: {codes.name}: it is not of {schemes}, or a tensor beside it is missing or "
        "has another shape or type"
    )


def _fp8_weight(
    codes: StoredTensor, scales: StoredTensor | None, quantization: Quantization
) -> QuantizedTensor:
    where = f"{codes.file}: {codes.name}: "
    if len(codes.shape) != 2 or not codes.shape[1] or codes.shape[1] % GROUP:
        raise CheckpointError(f"{where}shape {list(codes.shape)} is not served in FP8")
    size, depth = codes.shape
    block = None
    if scales is not None and scales.dtype in WEIGHT_TYPES:
        rows, columns = quantization.block or (0, 0)
        if scales.shape in ((), (1,), (1, 1)):
            block = (size, depth)
        elif scales.shape in ((size,), (size, 1)):
            block = (1, depth)
        elif rows and scales.shape == (-(-size // rows), -(-depth // columns)):
            block = (rows, columns)
    if scales is None or block is None:
        raise CheckpointError(f"{where}there are no scales beside it, or of another shape or type")
    if codes.name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight")):
        raise CheckpointError(f"{where}embeddings in FP8 are not served")
    return QuantizedTensor(
        name=codes.name,
        dtype="FP8",
        shape=codes.shape,
        start=codes.start,
        end=codes.end,
        file=codes.file,
        layout=Layout.FP8,
        codes=codes,
        scales=scales,
        zeros=None,
        block=block,
    )


def _shape(layout: Layout, shape: tuple[int, ...], bits: int) -> tuple[int, int]:
    """N and K of codes [a, b]."""
    first, second, per_word = *shape, 32 // bits
    match layout:
        case Layout.PACKED:
            return first, second * per_word
        case Layout.BYTES:
            return first, second
        case Layout.GPTQ:
            return second, first * per_word
        case _:
            return second * per_word, first


def _needed(
    layout: Layout, bits: int, *, size: int, depth: int, num_groups: int
) -> list[tuple[tuple[str, ...], tuple[int, int]]]:
    """Types and shapes of codes, scales and zeros."""

    def packed(number: int) -> int:
        return -(-number * bits // 32)

    floats, ints = tuple(WEIGHT_TYPES), ("I8",) if layout is Layout.BYTES else ("I32",)
    match layout:
        case Layout.PACKED:
            shapes = (size, packed(depth)), (size, num_groups), (packed(size), num_groups)
        case Layout.BYTES:
            shapes = (size, depth), (size, num_groups), (size, num_groups)
        case Layout.GPTQ:
            shapes = (packed(depth), size), (num_groups, size), (num_groups, packed(size))
        case _:
            shapes = (depth, packed(size)), (num_groups, size), (num_groups, packed(size))
    return list(zip((ints, floats, ints), shapes, strict=True))


def _fits(tensor: StoredTensor | None, needed: tuple[tuple[str, ...], tuple[int, int]]) -> bool:
    return tensor is None or (tensor.dtype in needed[0] and tensor.shape == needed[1])
