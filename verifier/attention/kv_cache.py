"""The K/V tensors of all layers, addressed by slot.

Slot = block * block_size + offset. The attention backend chooses how a layer lies in memory, see
`KVLayout`. After the pool's blocks come the trash block, which padding rows write to, and slack for
padded reads past the last block. Every value in the cache is finite: attention multiplies masked
values by zero, and 0 * NaN would spread one sequence's failure to another. Values that are not
finite are stored as zero, and `finite_rows` reports their tokens: their sequences must not go on.
"""

import enum
from dataclasses import dataclass

import torch

from verifier.batch.numerics import KV_CHUNK_TOKENS


class KVLayout(enum.Enum):
    """The memory layout of a layer's K or V."""

    # [num_kv_heads, num_slots, head_dim]: attention reads a contiguous run of blocks in place, as
    # [num_kv_heads, length, head_dim]; scattered blocks are gathered.
    HEADS_FIRST = "heads_first"
    # [num_blocks + 1, block_size, num_kv_heads, head_dim]: for kernels with a block table.
    BLOCKS_FIRST = "blocks_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The dimensions of a model's K/V."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, K and V."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size
        return values * self.dtype.itemsize


class KVCache:
    """Written by the model's forward pass only; owned by the engine thread."""

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        layout: KVLayout = KVLayout.HEADS_FIRST,
    ) -> None:
        self.block_size = block_size
        self.trash_slot = num_blocks * block_size
        self.layout = layout
        num_slots = (num_blocks + 1) * block_size
        # Each layer's keys and then its values, so that one call can write both.
        if layout is KVLayout.HEADS_FIRST:
            num_slots += KV_CHUNK_TOKENS
            size = (shape.num_layers, 2 * shape.num_kv_heads, num_slots, shape.head_dim)
            self._slots = torch.zeros(size, dtype=shape.dtype, device=device)
        else:
            heads = (shape.num_kv_heads, shape.head_dim)
            self._slots = torch.zeros(
                (2, shape.num_layers, num_slots, *heads), dtype=shape.dtype, device=device
            )
        # Per write since `begin_step`: the sum of each row's values, [T] float32.
        self._row_sums: list[torch.Tensor] = []

    def begin_step(self) -> None:
        """Resets `finite_rows`."""
        self._row_sums.clear()

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Stores K and V [num_kv_heads, T, head_dim] at `slot_mapping` [T] int64."""
        if self.layout is KVLayout.HEADS_FIRST:
            new = torch.cat((keys, values))
            cache, row_sums = self._slots[layer], row_sums_of(new, [0, 2])
        else:
            new = torch.stack((keys.transpose(0, 1), values.transpose(0, 1)))
            cache, row_sums = self._slots[:, layer], row_sums_of(new, [0, 2, 3])
        self._row_sums.append(row_sums)
        finite = torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
        cache.index_copy_(1, slot_mapping, finite)

    def finite_rows(self) -> torch.Tensor:
        """[T] bool, for the rows written since `begin_step`: whether K and V of all layers are
        finite.
        """
        return are_rows_finite(self._row_sums)

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """BLOCKS_FIRST: K and V [num_blocks + 1, block_size, num_kv_heads, head_dim], in place."""
        keys, values = self._slots[:, layer]
        size = (-1, self.block_size, *keys.shape[1:])
        return keys.view(size), values.view(size)

    @property
    def layers(self) -> torch.Tensor:
        """HEADS_FIRST: [num_layers, 2 * num_kv_heads, num_slots, head_dim], keys and then values,
        in place.
        """
        return self._slots


def row_sums_of(keys_and_values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The sums [T] float32 over `dims`: finite where every value is. (Finite values that add up to
    infinity, of 1e36 and more, would overflow in attention, too.) The fastest reduction that
    propagates NaN. Also compiled as TorchScript.
    """
    return keys_and_values.sum(dims, dtype=torch.float32)


def are_rows_finite(row_sums: list[torch.Tensor]) -> torch.Tensor:
    """[T] bool, from each layer's sums. Also compiled as TorchScript."""
    return torch.isfinite(torch.stack(row_sums)).all(dim=0)
