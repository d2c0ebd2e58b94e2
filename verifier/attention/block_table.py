"""Paged attention by a kernel that reads K/V through a block table: flash-attn's, or torch's own.

One call per layer for all sequences of the step, with any numbers of queries. Both kernels are
FlashAttention 2 with slightly different arguments; `flash_attn_kernel` and `torch_varlen_kernel`
translate. In common they have:

- K/V as blocks [num_blocks, block_size, num_kv_heads, head_dim], block_size a multiple of 256;
- float16 and bfloat16 only, head_dim a multiple of 8 up to 256, on CUDA;
- int32 indices, and a causal mask aligned to the end of each sequence's K/V;
- a window (left, right) that counts neighbours: a token that sees W tokens, itself included, has
  W - 1 to its left; -1 is no bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from verifier.attention.backend import to_device
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout

BLOCK_SIZE_MULTIPLE = 256
LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """One step's indices on the device; all int32."""

    cu_seqlens_q: torch.Tensor  # [B + 1]
    cu_seqlens_k: torch.Tensor  # [B + 1]
    seq_lens: torch.Tensor  # [B]
    block_table: torch.Tensor  # [B, max_blocks]; after a sequence's own blocks: 0, never read
    longest_q: int
    longest_k: int


class BlockTableKernel(Protocol):
    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: StepTables,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Attention [T, num_heads, head_dim] of queries [T, num_heads, head_dim] to blocks."""
        ...


class BlockTableBackend:
    """Owned by the engine thread."""

    def __init__(self, name: str, kernel: BlockTableKernel, *, device: torch.device) -> None:
        self.name = name
        self.kernel = kernel
        self.device = device

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "_BlockTableStep":
        return _BlockTableStep(self, layout, cache)


def flash_attn_kernel(flash_attn_varlen_func: Callable[..., Any]) -> BlockTableKernel:
    """For `flash_attn.flash_attn_varlen_func`, flash-attn 2.8.

    Without a window, both its sides have no bound: `causal` bounds the right one, and a bound there
    would keep heads that share K/V from being computed together in a decode.
    """

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: StepTables,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        attended: torch.Tensor = flash_attn_varlen_func(
            queries,
            keys,
            values,
            cu_seqlens_q=tables.cu_seqlens_q,
            cu_seqlens_k=tables.cu_seqlens_k,
            max_seqlen_q=tables.longest_q,
            max_seqlen_k=tables.longest_k,
            softmax_scale=scaling,
            causal=True,
            window_size=(_left(sliding_window), -1 if sliding_window is None else 0),
            block_table=tables.block_table,
        )
        return attended

    return attend


def torch_varlen_kernel(varlen_attn: Callable[..., Any]) -> BlockTableKernel:
    """For `torch.nn.attention.varlen.varlen_attn`, torch 2.12 and later.

    K/V are never split between thread blocks (`num_splits=1`): the split would depend on the
    batch's longest sequence, and automatic splitting of K/V in blocks is reported to give NaN in
    torch 2.13. That its window has 0 to the right is what makes it causal.
    """

    def attend(
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: StepTables,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        attended: torch.Tensor = varlen_attn(
            queries,
            keys,
            values,
            tables.cu_seqlens_q,
            tables.cu_seqlens_k,
            tables.longest_q,
            tables.longest_k,
            scale=scaling,
            window_size=(_left(sliding_window), 0),
            enable_gqa=queries.shape[1] != keys.shape[2],
            seqused_k=tables.seq_lens,
            block_table=tables.block_table,
            num_splits=1,
        )
        return attended

    return attend


def tables_of(layout: BatchLayout, device: torch.device) -> StepTables:
    """The step's indices, in one copy to the device."""
    num_sequences = len(layout.seq_lens)
    max_blocks = max(len(table) for table in layout.block_tables)
    offsets = np.cumsum([0, num_sequences + 1, num_sequences + 1, num_sequences])
    packed = np.zeros(int(offsets[-1]) + num_sequences * max_blocks, dtype=np.int32)
    packed[offsets[0] : offsets[1]] = layout.cu_seqlens_q
    np.cumsum(layout.seq_lens, out=packed[offsets[1] + 1 : offsets[2]])
    packed[offsets[2] : offsets[3]] = layout.seq_lens
    table = packed[offsets[3] :].reshape(num_sequences, max_blocks)
    for row, blocks in zip(table, layout.block_tables, strict=True):
        row[: len(blocks)] = blocks
    on_device = to_device(packed, device)
    return StepTables(
        cu_seqlens_q=on_device[offsets[0] : offsets[1]],
        cu_seqlens_k=on_device[offsets[1] : offsets[2]],
        seq_lens=on_device[offsets[2] : offsets[3]],
        block_table=on_device[offsets[3] :].view(num_sequences, max_blocks),
        longest_q=int(np.diff(layout.cu_seqlens_q).max()),
        longest_k=int(layout.seq_lens.max()),
    )


class _BlockTableStep:
    def __init__(self, backend: BlockTableBackend, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._cache = cache
        self._slot_mapping = to_device(layout.slot_mapping, backend.device)
        self._tables = tables_of(layout, backend.device)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self._cache.write(layer, keys, values, self._slot_mapping)
        cached_keys, cached_values = self._cache.blocks(layer)
        return self._backend.kernel(
            queries.transpose(0, 1),
            cached_keys,
            cached_values,
            self._tables,
            scaling=scaling,
            sliding_window=sliding_window,
        )


def _left(sliding_window: int | None) -> int:
    return -1 if sliding_window is None else sliding_window - 1
