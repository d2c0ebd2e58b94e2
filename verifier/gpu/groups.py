"""Weights of 4 bits in groups of inputs, as they lie in a GPU's memory.

Of each `CODE_BLOCK` inputs, a byte holds one of the first half in its low bits and the one as far
on in the second half in its high bits: so a product has the inputs in order without moving any
between threads. The scales and offsets of an input's group lie side by side for all outputs.

Shape legend: N outputs, K inputs, G groups of an output, E experts.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt
import torch
import torch.nn.functional

from verifier.checkpoint.group_formats import GROUP, TWICE_E2M1, Bytes, GroupedRows

CODE_BLOCK = 128
"""Inputs that are packed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """[N, K]. A weight is (code - offset) * scale, or with minima code * scale + offset; in
    float32, then rounded to the type of the rows that are multiplied.
    """

    num_inputs: int
    codes: torch.Tensor  # [N, ceil(K / CODE_BLOCK) * CODE_BLOCK / 2] uint8
    groups: torch.Tensor  # [G, N, 2] float16 or bfloat16: scale, offset
    has_minima: bool

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        *,
        size: int,
        dtype: torch.dtype,
        has_minima: bool,
        device: torch.device,
    ) -> Self:
        """Args:
        shape: N, K.
        size: inputs of a group: 32, 64 or 128.
        dtype: of scales and offsets.
        """
        num_outputs, num_inputs = shape
        groups = num_inputs // size, num_outputs, 2
        return cls(
            num_inputs=num_inputs,
            codes=_no_codes((num_outputs, num_inputs), device),
            groups=torch.empty(groups, dtype=dtype, device=device),
            has_minima=has_minima,
        )

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.num_inputs // len(self.groups)

    def fill(self, start: int, rows: GroupedRows, zero: int) -> None:
        """Args: zero: the code of a weight of zero, where rows have neither zeros nor minima."""
        outputs = slice(start, start + len(rows.codes))
        self.codes[outputs] = _packed(rows.codes, self.codes.device)
        scales, offsets = self.groups[:, outputs].unbind(2)
        scales.copy_(self._by_group(rows.factors))
        given = rows.zeros if rows.minima is None else rows.minima
        if given is None:
            offsets.fill_(zero)
        else:
            offsets.copy_(self._by_group(given))

    def _by_group(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """[G, n] of numbers [n, K / GROUP], which repeat in a larger group."""
        return torch.from_numpy(numbers[:, :: self.size // GROUP].T.copy())

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K]."""
        codes = _unpacked(self.codes, self.num_inputs)
        grouped = codes.reshape(len(codes), -1, self.size).float()
        scales, offsets = self.groups.float().transpose(0, 1)[..., None].unbind(2)
        values = grouped * scales + offsets if self.has_minima else (grouped - offsets) * scales
        return values.flatten(1).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MxWeight:
    """Experts' weights [E, N, K] in MXFP4, as `verifier.checkpoint.group_formats` explains it: of a
    code's value twice is a whole number, and its scale is kept as an exponent.
    """

    num_inputs: int
    codes: torch.Tensor  # [E, N, ceil(K / CODE_BLOCK) * CODE_BLOCK / 2] uint8
    exponents: torch.Tensor  # [E, N, K / GROUP] uint8: scales are 2 ** (exponent - 127)

    @classmethod
    def empty(cls, shape: tuple[int, int, int], *, device: torch.device) -> Self:
        """Args: shape: E, N, K."""
        num_experts, num_outputs, num_inputs = shape
        groups = num_experts, num_outputs, num_inputs // GROUP
        return cls(
            num_inputs=num_inputs,
            codes=_no_codes(shape, device),
            exponents=torch.empty(groups, dtype=torch.uint8, device=device),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N, K."""
        return (*self.codes.shape[:2], self.num_inputs)

    def fill(self, expert: int, start: int, rows: GroupedRows) -> None:
        outputs = slice(start, start + len(rows.codes))
        self.codes[expert, outputs] = _packed(rows.codes, self.codes.device)
        self.exponents[expert, outputs] = torch.from_numpy(rows.factors).to(self.codes.device)

    def widened(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K] of one expert."""
        codes = _unpacked(self.codes[expert], self.num_inputs)
        values = torch.tensor(TWICE_E2M1, dtype=torch.float32, device=codes.device)[codes.long()]
        exponents = self.exponents[expert].int()
        # 2 ** (exponent - 128) by its bits: a GPU's powers are not exact.
        scales = torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23)
        scales = scales.view(torch.float32)
        return (values.view(*scales.shape, GROUP) * scales[..., None]).flatten(1).to(dtype)


def _no_codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Room for the codes of weights of a shape."""
    *others, num_inputs = shape
    num_bytes = -(-num_inputs // CODE_BLOCK) * CODE_BLOCK // 2
    return torch.empty((*others, num_bytes), dtype=torch.uint8, device=device)


def _packed(codes: Bytes, device: torch.device) -> torch.Tensor:
    """Codes [n, K], a byte each, as they lie in memory."""
    wide = torch.from_numpy(codes).to(device)
    wide = torch.nn.functional.pad(wide, (0, -codes.shape[1] % CODE_BLOCK))
    low, high = wide.view(len(wide), -1, 2, CODE_BLOCK // 2).unbind(2)
    return (low | high << 4).flatten(1)


def _unpacked(codes: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Codes [n, K], a byte each, of what `_packed` makes."""
    halves = codes.view(len(codes), -1, CODE_BLOCK // 2)
    return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)[:, :num_inputs]
