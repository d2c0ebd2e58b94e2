"""Paged attention by torch's scaled_dot_product_attention: portable, and the CPU's default.

One call per sequence and layer. A sequence whose blocks are contiguous is read in place; any other
is gathered first. The query heads that share a K/V head are rows of one call, side by side for each
token, so that a call has few and large products. Under `strict` the query rows and the K/V length
are padded by the rules of `numerics.py`, and the padding is masked out.

Shape legend: T tokens of the step, G query heads per K/V head, L K/V length.
"""

import torch
import torch.nn.functional

from verifier.attention.backend import to_device
from verifier.attention.kv_cache import KVCache, KVLayout
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.numerics import Numerics


class SdpaBackend:
    """Owned by the engine thread; caches the masks that steps share."""

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

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "SdpaStep":
        return SdpaStep(self, layout, cache)


class SdpaStep:
    """The places of each sequence's queries and K/V in this step: lists, one entry per sequence.

    Attributes:
        slot_mapping: [T] int64, the slot of each token's K/V.
        query_ends: the end of each sequence's tokens; the first one's begin at 0.
        first_slots: of K/V that is read in place; -1: K/V is gathered from `scattered_slots`.
        kv_lengths: L, padding included.
        scattered_slots: [L] int64 for sequences whose blocks are not contiguous, else empty.
    """

    def __init__(self, backend: SdpaBackend, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._cache = cache
        numerics = backend.numerics
        self.slot_mapping = to_device(layout.slot_mapping, backend.device)
        offsets: list[int] = layout.cu_seqlens_q.tolist()
        seq_lens: list[int] = layout.seq_lens.tolist()
        self.query_ends = offsets[1:]
        self._query_starts = offsets[:-1]
        self._context_lengths = [
            seq_len - end + start
            for seq_len, start, end in zip(
                seq_lens, self._query_starts, self.query_ends, strict=True
            )
        ]
        self.kv_lengths = [numerics.padded_kv_length(seq_len) for seq_len in seq_lens]
        self.first_slots: list[int] = []
        self.scattered_slots: list[torch.Tensor] = []
        for seq_len, kv_length, block_table in zip(
            seq_lens, self.kv_lengths, layout.block_tables, strict=True
        ):
            num_blocks = -(-seq_len // cache.block_size)
            first = block_table[0]
            # The comparison of lists runs in C.
            if block_table[:num_blocks] == list(range(first, first + num_blocks)):
                self.first_slots.append(first * cache.block_size)
                self.scattered_slots.append(_NO_SLOTS)
            else:
                self.first_slots.append(-1)
                self.scattered_slots.append(
                    _slots_of(block_table[:num_blocks], kv_length, cache.block_size, backend.device)
                )
        self._mask_lists: dict[tuple[int | None, int], list[torch.Tensor]] = {}

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
        self._cache.write(layer, keys, values, self.slot_mapping)
        num_heads, num_tokens, head_dim = queries.shape
        num_kv_heads = keys.shape[0]
        group = num_heads // num_kv_heads
        attended = attend_grouped(
            queries.view(num_kv_heads, group, num_tokens, head_dim)
            .transpose(1, 2)
            .reshape(num_kv_heads, num_tokens * group, head_dim),
            self._cache.layers[layer],
            group,
            self.query_ends,
            self.first_slots,
            self.kv_lengths,
            self.scattered_slots,
            self.masks(sliding_window=sliding_window, group=group),
            scaling,
        )
        return (
            attended.view(num_kv_heads, num_tokens, group, head_dim)
            .transpose(0, 1)
            .reshape(num_tokens, num_heads, head_dim)
        )

    def masks(self, *, sliding_window: int | None, group: int) -> list[torch.Tensor]:
        """Each sequence's mask [rows, L], G rows per query and then padding."""
        masks = self._mask_lists.get((sliding_window, group))
        if masks is None:
            backend = self._backend
            masks = [
                backend.masks.mask(
                    num_rows=backend.numerics.padded_rows((end - start) * group),
                    group=group,
                    context_length=context_length,
                    kv_length=kv_length,
                    sliding_window=sliding_window,
                )
                for start, end, context_length, kv_length in zip(
                    self._query_starts,
                    self.query_ends,
                    self._context_lengths,
                    self.kv_lengths,
                    strict=True,
                )
            ]
            self._mask_lists[sliding_window, group] = masks
        return masks


def attend_grouped(
    queries: torch.Tensor,
    keys_and_values: torch.Tensor,
    group: int,
    query_ends: list[int],
    first_slots: list[int],
    kv_lengths: list[int],
    scattered_slots: list[torch.Tensor],
    masks: list[torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """Attention of one layer over its cached K/V. Also compiled as TorchScript.

    Args:
        queries: [num_kv_heads, T * G, head_dim], a token's G rows side by side.
        keys_and_values: [2 * num_kv_heads, num_slots, head_dim].
        group: G.
        query_ends, first_slots, kv_lengths, scattered_slots: of `SdpaStep`.
        masks: of `SdpaStep.masks`.

    Returns:
        The shape of `queries`; rows of padding tokens are zero.
    """
    num_kv_heads, num_rows, _ = queries.shape
    attended = torch.empty_like(queries)
    start = 0
    for i in range(len(query_ends)):
        end = query_ends[i] * group
        mask = masks[i]
        num_padded = mask.shape[0]
        # Padding rows are the rows that follow, whatever they hold; after the last row, zeros.
        query = queries[:, start : start + num_padded]
        if start + num_padded > num_rows:
            padding = start + num_padded - num_rows
            query = torch.nn.functional.pad(query, [0, 0, 0, padding])
        if first_slots[i] >= 0:
            key_and_value = keys_and_values[:, first_slots[i] : first_slots[i] + kv_lengths[i]]
        else:
            key_and_value = keys_and_values.index_select(1, scattered_slots[i])
        result = torch.nn.functional.scaled_dot_product_attention(
            query[None],
            key_and_value[None, :num_kv_heads],
            key_and_value[None, num_kv_heads:],
            attn_mask=mask,
            scale=scaling,
        )
        attended[:, start:end] = result[0, :, : end - start]
        start = end
    attended[:, start:] = 0
    return attended


_NO_SLOTS = torch.empty(0, dtype=torch.int64)


def _slots_of(
    blocks: list[int], kv_length: int, block_size: int, device: torch.device
) -> torch.Tensor:
    positions = torch.arange(kv_length, device=device)
    # Masked positions past the end read the sequence's own last block.
    logical = (positions // block_size).clamp_(max=len(blocks) - 1)
    return torch.tensor(blocks, device=device)[logical] * block_size + positions % block_size


class _CausalMasks:
    """Additive masks [rows, L]: 0 where a row of the token at position context_length + row // G
    attends, else -inf.

    Masks of few rows are slices of one wide table, so a decode step builds none. Prefill chunks
    build their own.
    """

    TABLE_TOKENS = 32
    MAX_TABLE_BYTES = 32 << 20

    def __init__(self, *, dtype: torch.dtype, device: torch.device, max_kv_length: int) -> None:
        self._dtype = dtype
        self._device = device
        self._max_kv_length = max_kv_length
        self._tables: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask(
        self,
        *,
        num_rows: int,
        group: int,
        context_length: int,
        kv_length: int,
        sliding_window: int | None,
    ) -> torch.Tensor:
        row_bytes = 2 * self._max_kv_length * self._dtype.itemsize
        table_rows = min(self.TABLE_TOKENS * group, self.MAX_TABLE_BYTES // row_bytes)
        if num_rows > table_rows:
            return self._build(num_rows, group, context_length, kv_length, sliding_window)
        table = self._tables.get((sliding_window, group))
        if table is None:
            table = self._build(
                table_rows, group, self._max_kv_length, 2 * self._max_kv_length, sliding_window
            )
            self._tables[sliding_window, group] = table
        # Column c of the mask is column c + max_kv_length - context_length of the table.
        start = self._max_kv_length - context_length
        window = table[:num_rows, start : start + kv_length]
        # CUDA's kernels require a mask that starts at a multiple of 16 bytes; a copy does.
        return window if self._device.type == "cpu" else window.clone()

    def _build(
        self,
        num_rows: int,
        group: int,
        context_length: int,
        kv_length: int,
        sliding_window: int | None,
    ) -> torch.Tensor:
        columns = torch.arange(kv_length, device=self._device)[None, :]
        rows = torch.arange(num_rows, device=self._device)[:, None]
        row_positions = rows // group + context_length
        is_hidden = columns > row_positions
        if sliding_window is not None:
            is_hidden |= columns <= row_positions - sliding_window
        mask = torch.zeros((num_rows, kv_length), dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, -torch.inf)
