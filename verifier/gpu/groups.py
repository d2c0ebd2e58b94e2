"""Weights in groups of inputs, as they lie in a GPU's memory.

An output's codes lie in blocks of `BLOCK_BYTES`. Of codes of 4 bits, a byte holds one of a block's
first half in its low bits and the one as far on in the second half in its high bits: so a product
has the inputs in order without moving any between threads. Scales and offsets of an input's group
lie side by side for all outputs.

Shape legend: N outputs, of all experts of a mixture one after the other; K inputs, G groups of an
output, E experts.
"""

import enum
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt
import torch
import torch.nn.functional

from verifier.checkpoint.group_formats import (
    TWICE_E2M1,
    GroupedRows,
    GroupFormat,
    group_minima,
    group_scales,
)

BLOCK_BYTES = 64
"""Of a block of an output's codes."""
LONGEST_GROUP = 2 * BLOCK_BYTES
"""Inputs, unless a group is all of an output's."""


class Element(enum.IntEnum):
    """What a code is."""

    UINT4 = 0
    INT8 = 1
    E4M3 = 2  # FP8
    # Of MXFP4. Of its value twice is a whole number, so half of the scale is meant.
    E2M1 = 3

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 2 if self in (Element.UINT4, Element.E2M1) else 1


class Offset(enum.IntEnum):
    """What a group has beside its scale."""

    NONE = 0
    ZERO = 1  # a weight is (code - zero) * scale
    MINIMUM = 2  # a weight is code * scale + minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """How weights are stored."""

    element: Element
    group: int  # inputs; 0: all of an output's
    # float16 or bfloat16 with an offset of the same type; float32; of E2M1 uint8, the exponents of
    # scales 2 ** (exponent - 127).
    scale: torch.dtype
    offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """[N, K]. A weight is computed of code, scale and offset in float32, then rounded to the type
    of the rows that are multiplied.
    """

    form: WeightForm
    shape: tuple[int, ...]  # N, K; or of experts E, N / E, K
    codes: torch.Tensor  # [N, whole blocks of K codes] uint8
    groups: torch.Tensor  # [G, N, 1 or 2]: scale, offset

    @classmethod
    def empty(cls, form: WeightForm, shape: tuple[int, ...], *, device: torch.device) -> Self:
        """Args: shape: as in the class; K is a multiple of a group."""
        *others, num_inputs = shape
        num_outputs = torch.Size(others).numel()
        num_bytes = -(-num_inputs // (form.element.per_byte * BLOCK_BYTES)) * BLOCK_BYTES
        num_groups = num_inputs // form.group if form.group else 1
        groups = num_groups, num_outputs, 1 if form.offset is Offset.NONE else 2
        return cls(
            form=form,
            shape=shape,
            codes=torch.empty((num_outputs, num_bytes), dtype=torch.uint8, device=device),
            groups=torch.empty(groups, dtype=form.scale, device=device),
        )

    def fill(self, start: int, rows: GroupedRows, stored: GroupFormat) -> None:
        """Args: stored: the rows' type."""
        element, offset = self.form.element, self.form.offset
        outputs = slice(start, start + len(rows.codes))
        codes = torch.from_numpy(rows.codes).to(self.codes.device)
        if offset is Offset.NONE and stored.zero:
            codes = codes - stored.zero
        self.codes[outputs] = packed(codes, element)
        numbers = self.groups[:, outputs]
        scales = rows.factors if stored.is_mx else group_scales(stored, rows)
        numbers[..., 0] = self._by_group(scales)
        if element is Element.E4M3:
            # A product with NaN is NaN whatever the others are, and kernels know no such code.
            is_nan = (codes & 127 == 127).view(len(codes), len(self.groups), -1).any(dim=2)
            numbers[..., 0].masked_fill_(is_nan.T, torch.nan)
        if offset is Offset.MINIMUM:
            minima = group_minima(stored, rows)
            assert minima is not None
            numbers[..., 1] = self._by_group(minima)
        elif offset is Offset.ZERO:
            numbers[..., 1] = stored.zero if rows.zeros is None else self._by_group(rows.zeros)

    def _by_group(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """[G, n] of numbers [n, a multiple of G], which repeat in a larger group."""
        step = numbers.shape[1] // len(self.groups)
        return torch.from_numpy(numbers[:, ::step].T.copy())

    def of_expert(self, expert: int) -> Self:
        """One expert's weight, in the same memory."""
        _, num_outputs, num_inputs = self.shape
        own = slice(expert * num_outputs, (expert + 1) * num_outputs)
        return type(self)(
            form=self.form,
            shape=(num_outputs, num_inputs),
            codes=self.codes[own],
            groups=self.groups[:, own],
        )

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, of this shape."""
        values = _values(self.codes, self.form.element, self.shape[-1])
        grouped = values.view(len(values), len(self.groups), -1)
        scales, *offsets = self.groups.transpose(0, 1)[..., None].unbind(2)
        scales = _half_powers(scales) if scales.dtype is torch.uint8 else scales.float()
        if self.form.offset is Offset.MINIMUM:
            grouped = grouped * scales + offsets[0].float()
        elif self.form.offset is Offset.ZERO:
            grouped = (grouped - offsets[0].float()) * scales
        else:
            grouped = grouped * scales
        return grouped.reshape(self.shape).to(dtype)


def packed(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes [n, K], a byte each, as they lie in memory."""
    if missing := -codes.shape[1] % (element.per_byte * BLOCK_BYTES):
        codes = torch.nn.functional.pad(codes, (0, missing))
    if element.per_byte == 1:
        return codes
    low, high = codes.view(len(codes), -1, 2, BLOCK_BYTES).unbind(2)
    return (low | high << 4).flatten(1)


def _values(codes: torch.Tensor, element: Element, num_inputs: int) -> torch.Tensor:
    """What codes stand for, [n, K] float32, of what `packed` makes."""
    if element.per_byte == 2:
        halves = codes.view(len(codes), -1, BLOCK_BYTES)
        codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
    codes = codes[:, :num_inputs].contiguous()
    match element:
        case Element.UINT4:
            return codes.float()
        case Element.INT8:
            return codes.view(torch.int8).float()
        case Element.E4M3:
            return codes.view(torch.float8_e4m3fn).float()
        case Element.E2M1:
            twice = torch.tensor(TWICE_E2M1, dtype=torch.float32, device=codes.device)
            return twice[codes.long()]


def _half_powers(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (exponent - 128), by its bits: a GPU's powers are not exact."""
    wide = exponents.int()
    return torch.where(wide < 2, 0x200000 << wide, (wide - 1) << 23).view(torch.float32)
