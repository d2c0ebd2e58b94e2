"""Attention from a step's arrays on the device, in plain torch: the oracle of what a graph does."""

import itertools

import torch

from verifier.attention.backend import DeviceTables
from verifier.attention.kv_cache import KVCache
from verifier.attention.sdpa import SdpaBackend


class TablesBackend(SdpaBackend):
    """Implements `AttendsToTables`; rows of no entry get `padding`."""

    name = "tables"

    def __init__(self, padding: float = 0.0) -> None:
        super().__init__(device=torch.device("cpu"))
        self._padding = padding

    def prepare_tables(self, tables: DeviceTables, cache: KVCache) -> "_TablesStep":
        return _TablesStep(tables, cache, self._padding)


class _TablesStep:
    def __init__(self, tables: DeviceTables, cache: KVCache, padding: float) -> None:
        self._tables = tables
        self._cache = cache
        self._padding = padding

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
        tables, block_size = self._tables, self._cache.block_size
        attended = torch.full_like(queries, self._padding)
        for entry, (start, end) in enumerate(itertools.pairwise(tables.cu_seqlens_q.tolist())):
            if start == end:
                continue
            length = int(tables.seq_lens[entry])
            assert length <= tables.longest_k
            positions = torch.arange(length)
            own = positions[length - (end - start) :, None]
            sees = positions <= own
            if sliding_window is not None:
                sees &= positions > own - sliding_window
            blocks = tables.block_tables[int(tables.table_rows[entry])].long()
            slots = blocks[positions // block_size] * block_size + positions % block_size
            cached_keys, cached_values = self._cache.gathered(layer, slots)
            attended[:, start:end] = torch.nn.functional.scaled_dot_product_attention(
                queries[None, :, start:end],
                cached_keys.transpose(0, 1)[None],
                cached_values.transpose(0, 1)[None],
                attn_mask=sees,
                scale=scaling,
                enable_gqa=True,
            )[0]
        return attended.transpose(0, 1)
