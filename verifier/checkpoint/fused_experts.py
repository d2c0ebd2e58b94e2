"""Experts that lie in one tensor, as tensors of each expert.

GPT-OSS's rows of gate and up take turns in one weight; what is not quantised lies by columns.

    MXFP4   gate_up_proj_blocks uint8 [E, 2 I, H / 32, 16], gate_up_proj_scales [E, 2 I, H / 32];
            down_proj_blocks [E, H, I / 32, 16], down_proj_scales; a byte's lower 4 bits come first
    plain   gate_up_proj [E, H, 2 I], down_proj [E, I, H]
    biases  gate_up_proj_bias [E, 2 I], down_proj_bias [E, H]

Others, without biases, are stacked: gate_up_proj [E, 2 I, H], gate first; down_proj [E, H, I].

Shape legend: E experts, H hidden size, I intermediate size.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from verifier.checkpoint.group_formats import GROUP
from verifier.checkpoint.quantized_tensors import Layout, QuantizedTensor
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import StoredTensor

# Which other families with all experts in one do not have.
_SIGN = ".experts.gate_up_proj_bias"
_STACKED_SIGN = ".experts.gate_up_proj"
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
# Of a stored weight: names, and how many of them share it.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with those of each expert in place of those of all.

    Raises:
        CheckpointError: one has an odd shape or type.
    """
    result = dict(tensors)
    for sign in [name for name in tensors if name.endswith(_SIGN)]:
        prefix = sign.removesuffix("gate_up_proj_bias")
        for stored, parts in _PARTS.items():
            weight, blocks, scales, bias = (
                result.pop(f"{prefix}{stored}{suffix}", None)
                for suffix in ("", _BLOCKS, _SCALES, _BIAS)
            )
            for tensor in (weight, bias):
                if tensor is not None:
                    result |= _split(prefix, tensor, parts, is_bias=tensor is bias)
            if blocks is not None and scales is not None:
                result |= _split_blocks(prefix, blocks, scales, parts)
    for sign in [name for name in result if name.endswith(_STACKED_SIGN)]:
        prefix = sign.removesuffix("gate_up_proj")
        for stored, parts in _PARTS.items():
            if (tensor := result.pop(prefix + stored, None)) is not None:
                result |= _split_stacked(prefix, tensor, parts)
    return result


def _split_stacked(
    prefix: str, tensor: StoredTensor, parts: tuple[str, ...]
) -> dict[str, StoredTensor]:
    """A weight [E, n * N, K] of n parts."""
    _check(tensor, 3, len(parts), tensor.shape[1:2])
    result: dict[str, StoredTensor] = {}
    for expert, whole in _each(tensor):
        size = (whole.end - whole.start) // len(parts)
        shape = (whole.shape[0] // len(parts), whole.shape[1])
        for part, name in enumerate(_names(prefix, expert, parts, "weight")):
            start = whole.start + part * size
            result[name] = dataclasses.replace(
                whole, name=name, shape=shape, start=start, end=start + size
            )
    return result


def _split(
    prefix: str, tensor: StoredTensor, parts: tuple[str, ...], *, is_bias: bool
) -> dict[str, StoredTensor]:
    """A weight [E, K, n * N], or a bias [E, n * N], of n parts."""
    _check(tensor, 2 if is_bias else 3, len(parts), tensor.shape[-1:])
    size, suffix = tensor.shape[-1] // len(parts), "bias" if is_bias else "weight"
    shape = (size,) if is_bias else (size, tensor.shape[1])
    return {
        name: dataclasses.replace(
            whole, name=name, shape=shape, is_by_columns=not is_bias, first_row=part,
            row_step=len(parts),
        )
        for expert, whole in _each(tensor)
        for part, name in enumerate(_names(prefix, expert, parts, suffix))
    }  # fmt: skip


def _split_blocks(
    prefix: str, blocks: StoredTensor, scales: StoredTensor, parts: tuple[str, ...]
) -> dict[str, StoredTensor]:
    _check(blocks, 4, len(parts), blocks.shape[1:2])
    is_fitting = scales.shape == blocks.shape[:-1] and blocks.shape[-1] == GROUP // 2
    if not is_fitting or {blocks.dtype, scales.dtype} != {"U8"}:
        raise CheckpointError(
            f"{blocks.file}: {blocks.name}: it is not of groups of {GROUP} weights, or its scales "
            "have another shape or type"
        )
    _, num_rows, num_groups, _ = blocks.shape
    result: dict[str, StoredTensor] = {}
    for (expert, codes), (_, own_scales) in zip(_each(blocks), _each(scales), strict=True):
        for part, name in enumerate(_names(prefix, expert, parts, "weight")):
            result[name] = QuantizedTensor(
                name=name,
                dtype="MXFP4",
                shape=(num_rows // len(parts), num_groups * GROUP),
                start=codes.start,
                end=codes.end,
                file=codes.file,
                first_row=part,
                row_step=len(parts),
                layout=Layout.MXFP4,
                codes=codes,
                scales=own_scales,
                zeros=None,
            )
    return result


def _check(
    tensor: StoredTensor, num_dimensions: int, num_parts: int, rows: tuple[int, ...]
) -> None:
    odd = len(tensor.shape) != num_dimensions or 0 in tensor.shape
    if odd or rows[0] % num_parts:
        raise CheckpointError(f"{tensor.file}: {tensor.name}: has shape {list(tensor.shape)}")


def _each(tensor: StoredTensor) -> Iterator[tuple[int, StoredTensor]]:
    size = (tensor.end - tensor.start) // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        start = tensor.start + expert * size
        yield (
            expert,
            dataclasses.replace(tensor, shape=tensor.shape[1:], start=start, end=start + size),
        )


def _names(prefix: str, expert: int, parts: tuple[str, ...], suffix: str) -> list[str]:
    return [f"{prefix}{expert}.{part}.{suffix}" for part in parts]
