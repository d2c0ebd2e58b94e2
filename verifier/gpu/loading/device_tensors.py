"""A checkpoint's tensors on the device: widened, quantised, or as codes.

A weight is read in pieces of some megabytes, and each piece's pages leave this process's memory
after it. So the host never holds the model, nor any whole tensor of it. Knows no layer.
"""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, TypeVar

import torch

from verifier.checkpoint.description import find_tensor
from verifier.checkpoint.group_formats import FORMATS, GROUP, GroupFormat
from verifier.checkpoint.quantized_tensors import QuantizedTensor
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, grouped_pieces, pieces
from verifier.checkpoint.weight_types import WeightType
from verifier.gpu.fp8 import FP8, ScaledLinear, quantised
from verifier.gpu.groups import LONGEST_GROUP, Element, GroupedWeight, Offset, WeightForm
from verifier.gpu.operations import Operations
from verifier.gpu.weights import DenseLinear, GroupedLinear, Linear

TORCH_DTYPES = {
    WeightType.FLOAT32: torch.float32,
    WeightType.BFLOAT16: torch.bfloat16,
    WeightType.FLOAT16: torch.float16,
}
_Piece = TypeVar("_Piece")


class Outputs(NamedTuple):
    """Some outputs of a module: rows [first, first + num_rows) of its tensors; -1: all of them."""

    module: str
    first: int = 0
    num_rows: int = -1


Modules = SequenceOf[str | Outputs]
"""Modules whose outputs follow one another; a name stands for all of them."""


class DeviceTensors:
    """Reads tensors of one checkpoint.

    Attributes:
        dtype: of what is neither quantised nor of codes.
    """

    def __init__(
        self,
        files: TensorFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        is_fp8: bool,
        norm_offset: float,
    ) -> None:
        """Args:
        is_fp8: whether linear layers are quantised to it.
        norm_offset: as in `Family`.
        """
        self.dtype = dtype
        self._files = files
        self._device = device
        self._operations = operations
        self._is_fp8 = is_fp8
        self._norm_offset = norm_offset

    def norm(self, module: str) -> torch.Tensor:
        """[size] float32, rounded to the model's dtype before the family's offset is added."""
        return self.values(module + ".weight") + self._norm_offset

    def values(self, name: str) -> torch.Tensor:
        """A tensor of any shape in float32, rounded to the model's dtype."""
        return self.exact_values(name).to(self.dtype).float()

    def number(self, name: str) -> float:
        """The only number of a tensor, rounded to the model's dtype."""
        return float(self._on_host(name).to(self.dtype))

    def exact_values(self, name: str) -> torch.Tensor:
        """A tensor of any shape in float32."""
        return self._on_host(name).to(self._device)

    def _on_host(self, name: str) -> torch.Tensor:
        """A tensor of any shape in float32."""
        tensor = find_tensor(self._files, name)
        rows = torch.cat([
            piece for _, piece in _float_pieces(self._files, tensor, 0, tensor.shape[0])
        ])  # fmt: skip
        return rows.view(tensor.shape).float()

    def linear(self, modules: Modules, shape: tuple[int, int], *, has_bias: bool = False) -> Linear:
        """One layer whose outputs are those of the modules, one after the other."""
        bias = self.bias(modules, shape[0]) if has_bias else None
        if self._is_fp8:
            weight, scale = self._quantised_matrix(modules, shape)
            return ScaledLinear(weight=weight, scale=scale, bias=bias)
        if (grouped := self.grouped(modules, shape)) is not None:
            return GroupedLinear(operations=self._operations, weight=grouped, bias=bias)
        return DenseLinear(
            operations=self._operations, weight=self.matrix(modules, shape), bias=bias
        )

    def bias(self, modules: Modules, size: int) -> torch.Tensor:
        """[size] of the model's dtype."""
        filled = self.empty(size, 1)
        self._fill(filled, self._parts(modules, ".bias"))
        return filled.view(size)

    def matrix(self, modules: Modules, shape: tuple[int, int]) -> torch.Tensor:
        """The rows of the modules' weights, one after the other, [N, K] of the model's dtype."""
        filled = self.empty(*shape)
        self.fill(filled, modules)
        return filled

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def fill(self, filled: torch.Tensor, modules: Modules) -> None:
        """As `matrix`, into a tensor [N, K] that is there."""
        self._fill(filled, self._parts(modules, ".weight"))

    def grouped(self, modules: Modules, shape: tuple[int, ...]) -> GroupedWeight | None:
        """As `matrix`, of the codes that are stored; None: it is to be widened.

        Args:
            shape: as of `GroupedWeight`.
        """
        parts = self._parts(modules, ".weight")
        tensors = [part.tensor for part in parts]
        kinds = {tensor.dtype for tensor in tensors}
        if self.dtype is torch.float32 or len(kinds) > 1 or not kinds.issubset(FORMATS):
            return None
        stored = FORMATS[kinds.pop()]
        scales = {_scale_type(tensor, stored) for tensor in tensors}
        if len(scales) > 1:
            return None
        form = _form_of(stored, scales.pop(), tensors)
        weight = GroupedWeight.empty(form, shape, device=self._device)
        for start, rows in self._pieces(parts, grouped_pieces):
            weight.fill(start, rows, stored)
        return weight

    def _parts(self, modules: Modules, suffix: str) -> list["_Part"]:
        outputs = [Outputs(each) if isinstance(each, str) else each for each in modules]
        tensors = [find_tensor(self._files, each.module + suffix) for each in outputs]
        return [
            _Part(tensor, each.first, tensor.shape[0] if each.num_rows < 0 else each.num_rows)
            for tensor, each in zip(tensors, outputs, strict=True)
        ]

    def _fill(self, filled: torch.Tensor, parts: list["_Part"]) -> None:
        for start, piece in self._pieces(parts, _float_pieces):
            filled[start : start + len(piece)].copy_(piece)

    def _quantised_matrix(
        self, modules: Modules, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `matrix`, then quantised: FP8 [N, K], and scales [N, 1] float32."""
        weight = torch.empty(shape, dtype=FP8, device=self._device)
        scale = torch.empty((shape[0], 1), dtype=torch.float32, device=self._device)
        for start, piece in self._pieces(self._parts(modules, ".weight"), _float_pieces):
            rows = slice(start, start + len(piece))
            weight[rows], scale[rows] = quantised(piece.to(self._device, self.dtype))
        return weight, scale

    def _pieces(
        self,
        parts: list["_Part"],
        read: Callable[[TensorFiles, StoredTensor, int, int], Iterator[tuple[int, _Piece]]],
    ) -> Iterator[tuple[int, _Piece]]:
        """All rows of the parts, one after the other: each piece's first one, and its rows."""
        first = 0
        for tensor, own_first, count in parts:
            for start, piece in read(self._files, tensor, own_first, count):
                yield first + start, piece
            first += count


class _Part(NamedTuple):
    """Rows of a tensor."""

    tensor: StoredTensor
    first: int
    num_rows: int


def _float_pieces(
    files: TensorFiles, tensor: StoredTensor, first: int, count: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """As `pieces`, on the host, in the checkpoint's dtype."""
    for start, piece in pieces(files, tensor, first, count):
        # A copy: the pages are read-only and leave memory, and torch warns of neither.
        yield start, torch.from_numpy(piece.copy()).view(TORCH_DTYPES[tensor.type])


def _form_of(
    stored: GroupFormat, scale: torch.dtype, tensors: SequenceOf[StoredTensor]
) -> WeightForm:
    """Args: scale: the type of scales."""
    if stored.is_float:
        element = Element.E4M3
    elif stored.is_mx:
        element = Element.E2M1
    else:
        element = Element.UINT4 if stored.bits == 4 else Element.INT8
    offset = Offset.NONE
    if stored.has_minimum:
        offset = Offset.MINIMUM
    elif stored.has_zeros or scale in (torch.float16, torch.bfloat16):
        offset = Offset.ZERO
    sizes = [
        each.group_size if isinstance(each, QuantizedTensor) else GROUP // stored.halves
        for each in tensors
    ]
    num_inputs = tensors[0].shape[1]
    # The last block of FP8 may be cut.
    group = 0 if min(sizes) == num_inputs else math.gcd(LONGEST_GROUP, num_inputs, *sizes)
    return WeightForm(element=element, group=group, scale=scale, offset=offset)


def _scale_type(tensor: StoredTensor, stored: GroupFormat) -> torch.dtype:
    """Which holds scales exactly, and offsets."""
    if stored.is_mx:
        return torch.uint8
    if stored.is_super or stored.is_float:
        return torch.float32
    if isinstance(tensor, QuantizedTensor):
        return TORCH_DTYPES[tensor.scales.type]
    return torch.float16
