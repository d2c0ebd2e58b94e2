"""The interface between the model's layers and a paged attention backend.

Once per step, a backend prepares a `StepAttention` from the layout: everything that all layers
share (masks, slots, ranges). Once per layer, the model's attention function passes it the new
queries, keys and values.

A backend that `AttendsToTables` prepares it from arrays that are on the device, too, and its
launches depend on nothing else: so they can be captured once and replayed for other steps.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout


class StepAttention(Protocol):
    """Attention of one step, prepared."""

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
        """Writes this step's K/V, then attends.

        Args:
            queries: [num_heads, T, head_dim].
            keys, values: [num_kv_heads, T, head_dim].
            sliding_window: how many tokens a token sees, itself included; None: all before it.

        Returns:
            [T, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes a `StepAttention` per step.

    One with an attribute `caps_scores` takes a `softcap` in `attend`: scores s become
    softcap * tanh(s / softcap) before they are masked. One with `adds_sinks` takes `sinks`
    [num_heads] float32: logits of a token without a value, which every token sees.
    """

    name: str

    def prepare(self, layout: BatchLayout, cache: KVCache) -> StepAttention: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTables:
    """What a step's E entries attend to: int32, on the device. Entries without queries read
    nothing; rows past the last entry's are padding.
    """

    counts: torch.Tensor  # [3]: the entries and the rows before the padding, the longest entry
    cu_seqlens_q: torch.Tensor  # [E + 1]
    seq_lens: torch.Tensor  # [E]
    table_rows: torch.Tensor  # [E], each entry's row of `block_tables`
    block_tables: torch.Tensor  # [tables, blocks]
    slot_mapping: torch.Tensor  # [T] int64; under zero: padding, whose K/V is not stored
    longest_k: int  # no entry of `seq_lens` is larger


def device_tables(layout: BatchLayout, device: torch.device) -> DeviceTables:
    """A layout's tables, a row for each of its entries; all of int32 in one copy to the device."""
    num_entries = len(layout.seq_lens)
    max_blocks = max(len(table) for table in layout.block_tables)
    longest_k = int(layout.seq_lens.max())
    sizes = (3, num_entries + 1, num_entries, num_entries, num_entries * max_blocks)
    packed = np.zeros(sum(sizes), dtype=np.int32)
    counts, cu_seqlens_q, seq_lens, table_rows, tables = np.split(packed, np.cumsum(sizes)[:-1])
    counts[:] = num_entries, layout.cu_seqlens_q[-1], longest_k
    cu_seqlens_q[:], seq_lens[:] = layout.cu_seqlens_q, layout.seq_lens
    table_rows[:] = np.arange(num_entries)
    for row, blocks in zip(
        tables.reshape(num_entries, max_blocks), layout.block_tables, strict=True
    ):
        row[: len(blocks)] = blocks
    counted, offsets, lengths, rows, blocks_of = to_device(packed, device).split(sizes)
    return DeviceTables(
        counts=counted,
        cu_seqlens_q=offsets,
        seq_lens=lengths,
        table_rows=rows,
        block_tables=blocks_of.view(num_entries, max_blocks),
        slot_mapping=to_device(layout.slot_mapping, device),
        longest_k=longest_k,
    )


@runtime_checkable
class AttendsToTables(Protocol):
    """An `AttentionBackend` whose kernels read a step's indices on the device."""

    def prepare_tables(self, tables: DeviceTables, cache: KVCache) -> StepAttention:
        """The contents of the tables may change until the step is computed, and between replays of
        a captured one.
        """
        ...


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copies a step's index array to the model's device; on CPU the tensor shares its memory.

    To a GPU the copy goes through pinned memory and is only queued: a copy from ordinary memory
    would first wait for the kernels queued before it.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
