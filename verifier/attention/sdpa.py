"""Paged attention by torch's scaled_dot_product_attention: portable, and the default.

One call per sequence and layer, over K/V that is gathered from the sequence's blocks.

Shape legend: T tokens of the step, Q tokens of one sequence in it, L its K/V length.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional

from verifier.attention.backend import to_device
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout


class SdpaBackend:
    """Owned by the engine thread."""

    name = "sdpa"

    def __init__(self, *, device: torch.device) -> None:
        self.device = device

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "_SdpaStep":
        return _SdpaStep(layout, cache, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """Its tokens are [start, end) of the step's; `slots` [L] int64 hold its K/V."""

    start: int
    end: int
    slots: torch.Tensor


class _SdpaStep:
    def __init__(self, layout: BatchLayout, cache: KVCache, device: torch.device) -> None:
        self._cache = cache
        self._slot_mapping = to_device(layout.slot_mapping, device)
        self._sequences = []
        for (start, end), length, blocks in zip(
            itertools.pairwise(layout.cu_seqlens_q.tolist()),
            layout.seq_lens.tolist(),
            layout.block_tables,
            strict=True,
        ):
            first_slots = np.array(blocks, dtype=np.int64) * cache.block_size
            slots = (first_slots[:, None] + np.arange(cache.block_size)).reshape(-1)[:length]
            self._sequences.append(_Sequence(start=start, end=end, slots=to_device(slots, device)))
        # Each sequence's mask, by sliding window.
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}

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
        if sliding_window not in self._masks:
            self._masks[sliding_window] = [_mask(s, sliding_window) for s in self._sequences]
        attended = torch.empty_like(queries)
        for sequence, mask in zip(self._sequences, self._masks[sliding_window], strict=True):
            cached_keys, cached_values = self._cache.gathered(layer, sequence.slots)
            attended[:, sequence.start : sequence.end] = (
                torch.nn.functional.scaled_dot_product_attention(
                    queries[None, :, sequence.start : sequence.end],
                    cached_keys.transpose(0, 1)[None],
                    cached_values.transpose(0, 1)[None],
                    attn_mask=mask,
                    scale=scaling,
                    enable_gqa=len(queries) != cached_keys.shape[1],
                )[0]
            )
        return attended.transpose(0, 1)


def _mask(sequence: _Sequence, sliding_window: int | None) -> torch.Tensor | None:
    """[Q, L] bool: which tokens each query sees, `sliding_window` of them at most, itself included;
    None: all.
    """
    length, num_queries = len(sequence.slots), sequence.end - sequence.start
    if num_queries == 1 and (sliding_window is None or sliding_window >= length):
        return None
    positions = torch.arange(length, device=sequence.slots.device)
    own = positions[length - num_queries :, None]
    sees = positions <= own
    if sliding_window is not None:
        sees &= positions > own - sliding_window
    return sees
