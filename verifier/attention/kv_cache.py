"""The K/V tensors of all layers, addressed by slot.

Slot = block * block_size + offset. Every value in the cache is finite: attention multiplies masked
values by zero, and 0 * NaN would spread one sequence's failure to another. Values that are not
finite are stored as zero, and `finite_rows` reports their tokens: their sequences must not go on.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class KVHeads(NamedTuple):
    """Of one layer; zeros: it keeps no K/V."""

    num_kv_heads: int
    head_dim: int


class CacheShape(Protocol):
    """The dimensions of a model's K/V, layer by layer."""

    @property
    def heads(self) -> SequenceOf[KVHeads]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Implements `CacheShape`, of layers that are alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def heads(self) -> SequenceOf[KVHeads]:
        return [KVHeads(self.num_kv_heads, self.head_dim)] * self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedKVShape:
    """Implements `CacheShape`, of any layers."""

    heads: SequenceOf[KVHeads]
    dtype: torch.dtype


def block_bytes(shape: CacheShape, block_size: int) -> int:
    """Bytes of one block over all layers, K and V."""
    values = sum(2 * each.num_kv_heads * each.head_dim * block_size for each in shape.heads)
    return values * shape.dtype.itemsize


class KVCache:
    """Written by the model's forward pass only; owned by the engine thread."""

    # Whether attention writes a step's K/V before it attends; else the model has done so.
    is_written_by_attention = True

    def __init__(
        self, shape: CacheShape, *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._heads = shape.heads
        # Each layer's keys and values side by side, contiguous: one call writes both, and torch
        # would copy a layer whole to gather from it if it were not.
        self._slots = [
            torch.zeros((2, num_blocks * block_size, *own), dtype=shape.dtype, device=device)
            for own in shape.heads
        ]
        # Per write since `begin_step`: the sum of each row's values, [T] float32.
        self._row_sums: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Resets `finite_rows`."""
        self._row_sums.clear()

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Stores K and V [num_kv_heads, T, head_dim] at `slot_mapping` [T] int64.

        Raises:
            ValueError: they have other heads than the cache.
        """
        heads = self._heads[layer]
        for states in (keys, values):
            if (states.shape[0], states.shape[2]) != heads:
                raise ValueError(
                    f"layer {layer} has keys {_shown(keys)} and values {_shown(values)}, where the "
                    f"configuration tells {heads.num_kv_heads} heads of {heads.head_dim}"
                )
        new = torch.stack((keys.transpose(0, 1), values.transpose(0, 1)))
        # Finite where every value is. (Finite values that add up to infinity, of 1e36 and more,
        # would overflow in attention, too.) The fastest reduction that propagates NaN.
        self.add_row_sums(new.sum([0, 2, 3], dtype=torch.float32))
        finite = torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
        self._slots[layer].index_copy_(1, slot_mapping, finite)

    def add_row_sums(self, row_sums: torch.Tensor) -> None:
        """Notes the sum of each row's values [T] float32, for whoever writes a layer's `blocks`
        without `write`: what is not finite must be stored as zero there, too.
        """
        self._row_sums.append(row_sums)

    @property
    def is_written(self) -> bool:
        """Whether any layer's K and V were written since `begin_step`."""
        return bool(self._row_sums)

    def finite_rows(self) -> torch.Tensor:
        """[T] bool, for the rows written since `begin_step`: whether K and V of all layers are
        finite.
        """
        return torch.isfinite(torch.stack(self._row_sums)).all(dim=0)

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [num_blocks, block_size, num_kv_heads, head_dim], in place."""
        keys, values = self._slots[layer]
        size = (-1, self.block_size, *keys.shape[1:])
        return keys.view(size), values.view(size)

    def gathered(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V [L, num_kv_heads, head_dim] at `slots` [L] int64."""
        keys, values = self._slots[layer].index_select(1, slots)
        return keys, values


def _shown(states: torch.Tensor) -> str:
    return f"of {states.shape[0]} heads of {states.shape[2]}"
