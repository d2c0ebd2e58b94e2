"""Attention with a softcap and sinks, written out: sequence by sequence, over gathered K/V."""

import itertools

import numpy as np
import torch

from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout


class CappedBackend:
    """An attention backend that serves softcaps and sinks; in float32."""

    name = "capped"
    caps_scores = adds_sinks = True

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "_CappedStep":
        return _CappedStep(layout, cache)


class _CappedStep:
    def __init__(self, layout: BatchLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout, device = self._layout, queries.device
        self._cache.write(layer, keys, values, torch.from_numpy(layout.slot_mapping).to(device))
        block_keys, block_values = self._cache.blocks(layer)
        group = len(queries) // block_keys.shape[2]
        rows = []
        for (start, end), length, blocks in zip(
            itertools.pairwise(layout.cu_seqlens_q.tolist()),
            layout.seq_lens.tolist(),
            layout.block_tables,
            strict=True,
        ):
            table = torch.tensor(blocks, device=device)
            k = block_keys[table].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            v = block_values[table].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("hqd,khd->hqk", queries[:, start:end].float(), k) * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            own = np.arange(length - (end - start), length)[:, None]
            apart = torch.from_numpy(own - np.arange(length)).to(device)
            hidden = (apart < 0) | (apart >= (sliding_window or length))
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                of_queries = sinks[:, None, None].expand(-1, end - start, 1)
                scores = torch.cat((scores, of_queries), dim=-1)
            weights = scores.softmax(dim=-1)[..., :length]
            rows.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(rows).to(queries.dtype)
