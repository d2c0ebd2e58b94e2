"""A checkpoint's tensors, packed for products or as they are.

Owns how the parts of a matrix lie in its blocks, and which of them stay quantised. Knows no layer.
"""

import dataclasses
import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.description import find_tensor
from verifier.checkpoint.group_formats import FORMATS
from verifier.checkpoint.model_config import ModelConfig
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, grouped_pieces, pieces
from verifier.checkpoint.weight_types import LANES, BitsArray, FloatArray, WeightType, widened
from verifier.cpu.group_packing import num_records, pack_groups
from verifier.cpu.kernels.group_records import record_bytes
from verifier.cpu.packing import converted, pack_rows
from verifier.cpu.weights import Matrix, Part

# Bytes; a vector of 16 weights then never lies across two cache lines.
_ALIGNMENT = 64


class PackedTensors:
    """Reads tensors of one checkpoint.

    Attributes:
        files, config: of the checkpoint.
        linear_type, other_type: of the linear layers' weights, and of all others.
    """

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        *,
        linear_type: WeightType,
        other_type: WeightType,
        keeps_codes: bool,
    ) -> None:
        """Args: keeps_codes: whether linear weights stay quantised as they are stored."""
        self.files = files
        self.config = config
        self.linear_type = linear_type
        self.other_type = other_type
        self._keeps_codes = keeps_codes

    def matrix(
        self,
        names: SequenceOf[str],
        sizes: SequenceOf[int],
        *,
        has_bias: bool,
        depth: int | None = None,
        weight_type: WeightType | None = None,
    ) -> Matrix:
        """Packs weights into one matrix, each part's outputs rounded up to a multiple of 16.

        Args:
            names: of modules; either one for each part, or one that holds all parts' rows.
            sizes: outputs of each part.
            depth: K if it is more than the weights have; the rest is zero.
            weight_type: as it is stored; None: as linear layers are.
        """
        num_outputs = sizes[0] if len(sizes) == 1 else sum(map(rounded, sizes))
        depth = depth or find_tensor(self.files, names[0] + ".weight").shape[1]
        matrix = self.empty(names, sizes, depth, num_outputs=num_outputs, weight_type=weight_type)
        self.fill(matrix, names, sizes)
        bias = None
        if has_bias:
            bias = np.zeros(matrix.num_blocks * LANES, dtype=np.float32)
            self.fill_bias(bias, names, sizes)
        return dataclasses.replace(matrix, bias=bias)

    def empty(
        self,
        names: SequenceOf[str],
        sizes: SequenceOf[int],
        depth: int,
        *,
        num_outputs: int,
        num_experts: int | None = None,
        weight_type: WeightType | None = None,
    ) -> Matrix:
        """A matrix of zeros for weights that `_fill` packs, its arguments as in `matrix`."""
        # Of routers, whose kernel takes rows that are not rounded.
        is_plain = weight_type is not None
        weight_type = weight_type or self.linear_type
        experts = () if num_experts is None else (num_experts,)
        if self.linear_type is not WeightType.GROUPS:
            num_blocks = rounded(num_outputs) // LANES
            blocks = _zeros((*experts, num_blocks, depth, LANES), weight_type.value)
            scales = None
            if weight_type is WeightType.FP8:
                scales = np.zeros((*experts, num_blocks * LANES), dtype=np.float32)
            parts = [Part(blocks=blocks)]
            return Matrix(parts=parts, num_outputs=num_outputs, depth=depth, scales=scales)
        parts = []
        for (name, _), size in zip(_places(names, sizes), sizes, strict=True):
            tensor = find_tensor(self.files, name + ".weight")
            form = None if is_plain else group_form(tensor)
            shape: tuple[int, ...] = (depth, LANES)
            if form is not None:
                shape = num_records(form, depth), record_bytes(FORMATS[form])
            dtype = tensor.type.value if form is None else np.uint8
            blocks = _zeros((*experts, rounded(size) // LANES, *shape), dtype)
            parts.append(Part(blocks=blocks, form=form))
        return Matrix(parts=parts, num_outputs=num_outputs, depth=depth)

    def fill(self, matrix: Matrix, names: SequenceOf[str], sizes: SequenceOf[int]) -> None:
        for index, (start, (name, first_row), size) in enumerate(
            zip(_starts(sizes), _places(names, sizes), sizes, strict=True)
        ):
            tensor = find_tensor(self.files, name + ".weight")
            if self.linear_type is WeightType.GROUPS:
                self._fill_part(matrix.parts[index], tensor, first_row, size)
                continue
            keeps_codes = self._keeps_codes and tensor.dtype in FORMATS
            pack_rows(
                self.files,
                tensor,
                first_row,
                size,
                weight_type=WeightType(matrix.blocks.dtype.type),
                blocks=matrix.blocks[start // LANES :],
                scales=None if matrix.scales is None else matrix.scales[start:],
                rounded_to=None if keeps_codes else self.other_type,
            )

    def fill_bias(self, bias: FloatArray, names: SequenceOf[str], sizes: SequenceOf[int]) -> None:
        for start, (name, first_row), size in zip(
            _starts(sizes), _places(names, sizes), sizes, strict=True
        ):
            values = self.values(name + ".bias")
            bias[start : start + size] = values[first_row : first_row + size]

    def _fill_part(self, part: Part, tensor: StoredTensor, first_row: int, num_rows: int) -> None:
        is_same = group_form(tensor) == part.form
        if part.form is None:
            is_same = tensor.type.value == part.blocks.dtype
        if not is_same:
            raise CheckpointError(f"{tensor.name} is stored as {tensor.dtype}, others otherwise")
        if part.form is None:
            pack_rows(
                self.files,
                tensor,
                first_row,
                num_rows,
                weight_type=tensor.type,
                blocks=part.blocks,
                scales=None,
                rounded_to=tensor.type,
            )
            return
        for start, rows in grouped_pieces(self.files, tensor, first_row, num_rows):
            end = start + rounded(len(rows.codes))
            pack_groups(part.form, rows, part.blocks[start // LANES : end // LANES])

    def norm(self, name: str) -> FloatArray:
        offset = np.float32(self.config.family.norm_offset)
        return self.values(name + ".weight") + offset

    def values(self, name: str) -> FloatArray:
        """A tensor's values [n], rounded to the type of the model unless weights are in groups."""
        in_groups = self.linear_type is WeightType.GROUPS
        kind = WeightType.FLOAT32 if in_groups else self.other_type
        return np.array(widened(self.plain(name, kind), kind), dtype=np.float32).reshape(-1)

    def plain(self, name: str, kind: WeightType) -> BitsArray:
        """A copy of a tensor [n] or [n, K], not packed, as a type."""
        tensor = find_tensor(self.files, name)
        result: BitsArray = np.empty(tensor.shape, dtype=kind.value)
        rows = result.reshape(tensor.shape[0], -1)
        for start, piece in pieces(self.files, tensor, 0, tensor.shape[0]):
            rows[start : start + len(piece)] = converted(piece, tensor.type, kind)
        return result


def group_form(tensor: StoredTensor) -> str | None:
    """The type of weights in groups, a key of `FORMATS`; None: they are not."""
    return tensor.dtype if tensor.dtype in FORMATS else None


def scaled(matrix: Matrix, factor: float) -> Matrix:
    """The matrix whose outputs are so many times as large."""
    if factor == 1.0:
        return matrix
    scales, by = matrix.scales, np.float32(factor)
    if scales is None:
        scales = np.ones(matrix.num_blocks * LANES, dtype=np.float32)
    bias = None if matrix.bias is None else matrix.bias * by
    return dataclasses.replace(matrix, scales=scales * by, bias=bias)


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> BitsArray:
    """Aligned zeros; their pages take no memory until they are written."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    result: BitsArray = memory[start : start + num_bytes].view(dtype).reshape(shape)
    return result


def one_of(experts: Matrix, expert: int) -> Matrix:
    return dataclasses.replace(
        experts,
        parts=[Part(blocks=part.blocks[expert], form=part.form) for part in experts.parts],
        scales=None if experts.scales is None else experts.scales[expert],
    )


def _places(names: SequenceOf[str], sizes: SequenceOf[int]) -> list[tuple[str, int]]:
    """Each part's module and its first row there."""
    if len(names) == len(sizes):
        return [(name, 0) for name in names]
    return [(names[0], sum(sizes[:part])) for part in range(len(sizes))]


def _starts(sizes: SequenceOf[int]) -> list[int]:
    """Each part's first output in its packed matrix."""
    return [sum(map(rounded, sizes[:part])) for part in range(len(sizes))]


def rounded(size: int) -> int:
    return -(-size // LANES) * LANES
