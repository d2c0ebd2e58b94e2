"""The attention backend of our own Triton kernels: for GPUs; blocks are of any power of two."""

import contextlib
import dataclasses
import functools
import itertools
import sys

import torch

from verifier.attention.backend import DeviceTables, device_tables
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout
from verifier.gpu.attention.tiles import (
    LARGE_TILES,
    SMALL_TILES,
    Splitting,
    tiles_of_all_steps,
    tiles_of_step,
)
from verifier.gpu.attention.triton_paged import paged_attention, write
from verifier.gpu.kernels.overlapping_kernels import can_overlap


class TritonBackend:
    """Owned by the engine thread."""

    name = "triton"
    # `TritonStep.attend` takes `softcap` and `sinks`.
    caps_scores = True
    adds_sinks = True

    def __init__(
        self,
        *,
        device: torch.device,
        splitting: Splitting | None = None,
        is_strict: bool = False,
        overlaps: bool | None = None,
    ) -> None:
        """Args:
        is_strict: all steps have one shape of tiles, so a row has the same bits in each.
        overlaps: kernels begin as `overlapping_kernels.py` says; None: if the device's can.
        """
        self.device = device
        self._overlaps = overlaps
        self.splitting = splitting or Splitting()
        self.is_strict = is_strict
        # For which layers all kernels are compiled: by heads, window, and whether they have a
        # softcap and sinks.
        self._compiled: set[tuple[object, ...]] = set()

    @functools.cached_property
    def overlaps(self) -> bool:
        """Whether kernels begin so; asks the device, unless it was given."""
        return can_overlap(self.device) if self._overlaps is None else self._overlaps

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "TritonStep":
        """Rows of the layout past its last sequence are padding, and so are slots under zero."""
        return TritonStep(self, cache, device_tables(layout, self.device))

    def prepare_tables(self, tables: DeviceTables, cache: KVCache) -> "TritonStep":
        """See `AttendsToTables`."""
        return TritonStep(self, cache, tables)

    def compile(
        self,
        queries: torch.Tensor,
        cached_keys: torch.Tensor,
        cached_values: torch.Tensor,
        *,
        sliding_window: int | None,
        has_softcap: bool,
        has_sinks: bool = False,
    ) -> None:
        """At the first step, which is the check of the model when it is loaded, runs the kernels of
        one program per sequence and those of several, for one token, in tiles of each shape, as
        steps of few rows launch them and of many. So no request waits for the compiler.
        """
        heads = len(queries), *cached_keys.shape[2:]
        kind = *heads, sliding_window, has_softcap, has_sinks
        if kind in self._compiled:
            return
        one = torch.ones(1, dtype=torch.int32, device=queries.device)
        offsets = torch.arange(2, dtype=torch.int32, device=queries.device)
        tables = DeviceTables(
            counts=torch.ones(3, dtype=torch.int32, device=queries.device),
            cu_seqlens_q=offsets,
            seq_lens=one,
            table_rows=torch.zeros_like(one),
            block_tables=torch.zeros_like(one)[None],
            slot_mapping=torch.zeros_like(one),
            longest_k=max(tiles.split_tokens for tiles in (LARGE_TILES, SMALL_TILES)) + 1,
        )
        all_tiles = tiles_of_all_steps(queries.dtype, queries.shape[2], is_strict=self.is_strict)
        for tiles, overlaps, enough_programs in itertools.product(
            all_tiles, {False, self.overlaps}, (0, sys.maxsize)
        ):
            if tiles is SMALL_TILES and overlaps is not self.overlaps:
                continue  # of so few rows that kernels always overlap where they can
            paged_attention(
                queries[:, :1],
                cached_keys,
                cached_values,
                tables,
                tiles=tiles,
                scaling=1.0,
                sliding_window=sliding_window,
                softcap=1.0 if has_softcap else 0.0,
                sinks=queries.new_zeros(len(queries), dtype=torch.float32) if has_sinks else None,
                splitting=dataclasses.replace(self.splitting, enough_programs=enough_programs),
                overlaps=overlaps,
            )
        self._compiled.add(kind)


class TritonStep:
    """Attention of one step."""

    def __init__(self, backend: TritonBackend, cache: KVCache, tables: DeviceTables) -> None:
        self._backend = backend
        self._cache = cache
        self._tables = tables

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
        """Args:
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay as they are.
        sinks: as in `paged_attention`.
        """
        cached_keys, cached_values = self._cache.blocks(layer)
        # Triton launches on the thread's current device.
        with torch.cuda.device(queries.device) if queries.is_cuda else contextlib.nullcontext():
            if self._cache.is_written_by_attention:
                self._cache.add_row_sums(
                    write(keys, values, self._tables.slot_mapping, cached_keys, cached_values)
                )
            self._backend.compile(
                queries,
                cached_keys,
                cached_values,
                sliding_window=sliding_window,
                has_softcap=softcap > 0.0,
                has_sinks=sinks is not None,
            )
            return paged_attention(
                queries,
                cached_keys,
                cached_values,
                self._tables,
                tiles=tiles_of_step(queries, is_strict=self._backend.is_strict),
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
                splitting=self._backend.splitting,
                overlaps=self._backend.overlaps,
            )
