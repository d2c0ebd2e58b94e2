"""Paged attention by flash-attn's kernel (2.8), which reads K/V through a block table: one call per
layer for all sequences of the step, with any numbers of queries.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from verifier.attention.backend import device_tables, to_device
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout

BLOCK_SIZE_MULTIPLE = 256
DTYPES = (torch.float16, torch.bfloat16)


class FlashAttentionBackend:
    """Owned by the engine thread."""

    name = "flash_attn"

    def __init__(self, kernel: Callable[..., torch.Tensor], *, device: torch.device) -> None:
        """`kernel`: `flash_attn.flash_attn_varlen_func`."""
        self.kernel = kernel
        self.device = device

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "_FlashAttentionStep":
        return _FlashAttentionStep(self, layout, cache)


class _FlashAttentionStep:
    def __init__(self, backend: FlashAttentionBackend, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._cache = cache
        tables = device_tables(layout, backend.device)
        self._slot_mapping = tables.slot_mapping
        cu_seqlens_k = np.concatenate(([0], np.cumsum(layout.seq_lens))).astype(np.int32)
        self._arguments: dict[str, Any] = {
            "cu_seqlens_q": tables.cu_seqlens_q,
            "cu_seqlens_k": to_device(cu_seqlens_k, backend.device),
            "max_seqlen_q": int(np.diff(layout.cu_seqlens_q).max()),
            "max_seqlen_k": tables.longest_k,
            "block_table": tables.block_tables,
        }

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
        """The kernel's window counts neighbours: a token that sees W tokens has W - 1 to its left.

        Without a window, both its sides have no bound (-1): `causal` bounds the right one, and a
        bound there would keep heads that share K/V from being computed together in a decode.
        """
        self._cache.write(layer, keys, values, self._slot_mapping)
        cached_keys, cached_values = self._cache.blocks(layer)
        return self._backend.kernel(
            queries.transpose(0, 1),
            cached_keys,
            cached_values,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            **self._arguments,
        )
