"""Paged attention by torch's scaled_dot_product_attention: portable, and the CPU's default.

One call per sequence and layer. A sequence whose blocks lie one after another is read in place;
any other is gathered first. Under `strict` the query rows and the K/V length are padded as
`numerics.py` says; what is padded is masked out.
"""

import torch
import torch.nn.functional

from verifier.batch_layout import BatchLayout
from verifier.device_copy import to_device
from verifier.kv_cache import KVCache, KVLayout
from verifier.numerics import Numerics


class SdpaBackend:
    """Owned by the engine thread; holds the masks that steps have in common."""

    name = "sdpa"
    kv_layout = KVLayout.HEADS_FIRST

    def __init__(
        self, *, numerics: Numerics, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        self.numerics = numerics
        self.masks = _CausalMasks(
            dtype=dtype, device=device, max_kv_length=numerics.padded_kv_length(max_model_len)
        )
        self.device = device

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "_SdpaStep":
        return _SdpaStep(self, layout, cache)


class _SequenceRange:
    """Where one sequence's queries and K/V are in this step."""

    __slots__ = ("context_length", "first_slot", "kv_padded", "query_end", "query_start", "slots")

    def __init__(
        self,
        *,
        query_start: int,
        query_end: int,
        seq_len: int,
        block_table: list[int],
        numerics: Numerics,
        cache: KVCache,
        device: torch.device,
    ) -> None:
        self.query_start = query_start
        self.query_end = query_end
        self.context_length = seq_len - (query_end - query_start)
        self.kv_padded = numerics.padded_kv_length(seq_len)
        num_blocks = -(-seq_len // cache.block_size)
        first = block_table[0]
        self.first_slot = first * cache.block_size
        self.slots: torch.Tensor | None = None
        # Blocks are distinct, so first and last at the right distance and rising in between is
        # what contiguity means; the comparison of lists runs in C.
        if block_table[:num_blocks] != list(range(first, first + num_blocks)):
            positions = torch.arange(self.kv_padded, device=device)
            # Masked positions past the end read the sequence's own last block again.
            logical = (positions // cache.block_size).clamp_(max=num_blocks - 1)
            blocks = torch.tensor(block_table[:num_blocks], device=device)
            self.slots = blocks[logical] * cache.block_size + positions % cache.block_size


class _SdpaStep:
    def __init__(self, backend: SdpaBackend, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._cache = cache
        self._slot_mapping = to_device(layout.slot_mapping, backend.device)
        offsets = layout.cu_seqlens_q.tolist()
        self._ranges = [
            _SequenceRange(
                query_start=start,
                query_end=end,
                seq_len=seq_len,
                block_table=block_table,
                numerics=backend.numerics,
                cache=cache,
                device=backend.device,
            )
            for start, end, seq_len, block_table in zip(
                offsets, offsets[1:], layout.seq_lens.tolist(), layout.block_tables, strict=False
            )
        ]
        self._mask_lists: dict[int | None, list[torch.Tensor]] = {}

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
        num_heads, num_tokens, head_dim = queries.shape
        attended_parts = []
        is_grouped = keys.shape[0] != num_heads
        for place, mask in zip(self._ranges, self._masks(sliding_window), strict=True):
            num_rows = place.query_end - place.query_start
            num_padded = mask.shape[0]
            query = queries[:, place.query_start : place.query_start + num_padded]
            if query.shape[1] < num_padded:
                padding = num_padded - query.shape[1]
                query = torch.nn.functional.pad(query, (0, 0, 0, padding))
            if place.slots is None:
                key, value = self._cache.view(layer, place.first_slot, place.kv_padded)
            else:
                key, value = self._cache.gather(layer, place.slots)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[None],
                key[None],
                value[None],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=is_grouped,
            )
            attended_parts.append(attended[0, :, :num_rows])
        num_padding = num_tokens - self._ranges[-1].query_end
        attended_parts.append(queries.new_zeros((num_heads, num_padding, head_dim)))
        return torch.cat(attended_parts, dim=1).transpose(0, 1)

    def _masks(self, sliding_window: int | None) -> list[torch.Tensor]:
        masks = self._mask_lists.get(sliding_window)
        if masks is None:
            backend = self._backend
            masks = [
                backend.masks.mask(
                    num_rows=backend.numerics.padded_rows(place.query_end - place.query_start),
                    context_length=place.context_length,
                    kv_length=place.kv_padded,
                    sliding_window=sliding_window,
                )
                for place in self._ranges
            ]
            self._mask_lists[sliding_window] = masks
        return masks


class _CausalMasks:
    """Additive masks [rows, kv_length]: 0 where row j, at position context_length + j, may look.

    All masks of few rows are windows into one wide table per sliding window, so a decode step
    makes none. Prefill chunks build their own.
    """

    TABLE_ROWS = 64

    def __init__(self, *, dtype: torch.dtype, device: torch.device, max_kv_length: int) -> None:
        self._dtype = dtype
        self._device = device
        self._reach = max_kv_length
        self._tables: dict[int | None, torch.Tensor] = {}

    def mask(
        self, *, num_rows: int, context_length: int, kv_length: int, sliding_window: int | None
    ) -> torch.Tensor:
        if num_rows > self.TABLE_ROWS:
            return self._build(num_rows, context_length, kv_length, sliding_window)
        table = self._tables.get(sliding_window)
        if table is None:
            table = self._build(self.TABLE_ROWS, self._reach, 2 * self._reach, sliding_window)
            self._tables[sliding_window] = table
        # Column c of the mask is column c + reach - context_length of the table.
        start = self._reach - context_length
        window = table[:num_rows, start : start + kv_length]
        # CUDA's kernels want a mask that starts at a multiple of 16 bytes; a copy does.
        return window if self._device.type == "cpu" else window.clone()

    def _build(
        self, num_rows: int, context_length: int, kv_length: int, sliding_window: int | None
    ) -> torch.Tensor:
        columns = torch.arange(kv_length, device=self._device)[None, :]
        row_positions = torch.arange(num_rows, device=self._device)[:, None] + context_length
        is_hidden = columns > row_positions
        if sliding_window is not None:
            is_hidden |= columns <= row_positions - sliding_window
        mask = torch.zeros((num_rows, kv_length), dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, -torch.inf)
