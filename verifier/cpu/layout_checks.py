"""Passes a layout to the kernels, after checking what it must keep to, so that they read and write
nothing outside their buffers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.cpu.kernels.tiles import TABLE_PADDING

BoolArray = npt.NDArray[np.bool_]

_TABLE_PADDING = np.zeros(TABLE_PADDING, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a decoder has room for.

    Attributes:
        num_slots: of the cache; also the most tokens of a sequence.
        num_cache_blocks: as kernels see them.
        block_size: tokens per block, as layouts have them.
        pieces_per_block: how many blocks that is for kernels.
    """

    max_num_tokens: int
    vocab_size: int
    num_slots: int
    num_cache_blocks: int
    block_size: int
    pieces_per_block: int


# By the number that `_describe` returns.
_FAULTS = (
    "",
    "more tokens or rows than a forward pass has room for, or none",
    "arrays of different lengths",
    "a token id outside the vocabulary",
    "a position outside the cache",
    "a slot outside the cache",
    "a logits row that is no token's",
    "query offsets that do not rise from 0 up to the number of tokens",
    "a sequence that is longer than the cache, or shorter than its queries",
    "a block outside the cache",
    "a block table that is shorter than its sequence",
    "rotary embeddings of neither short nor long sequences",
)


def describe_step(
    limits: Limits,
    layout: BatchLayout,
    steps: npt.NDArray[Any],
    is_finite: BoolArray,
) -> list[npt.NDArray[Any]]:
    """Writes the addresses and lengths of a layout's arrays to `steps[0]`.

    Args:
        steps: of `verifier.cpu.records.STEP`.
        is_finite: [T], which the forward pass fills.

    Returns:
        The arrays, which must be kept as long as `steps` is used.

    Raises:
        ValueError: a kernel would leave its buffers.
    """
    block_size, pieces = limits.block_size, limits.pieces_per_block
    tables = np.concatenate(
        [
            np.asarray(table[: -(-length // block_size)], dtype=np.int32)
            for table, length in zip(layout.block_tables, layout.seq_lens.tolist(), strict=True)
        ]
        + [_TABLE_PADDING]
    )
    if pieces > 1:
        tables = np.repeat(tables * pieces, pieces)
        tables += np.tile(np.arange(pieces, dtype=np.int32), len(tables) // pieces)
    table_offsets = np.empty(len(layout.seq_lens), dtype=np.int64)
    token_ids, positions, uses_long_rope, slots, rows, query_offsets, lengths = arrays = [
        np.ascontiguousarray(array, dtype=np.int64)
        for array in (
            layout.input_token_ids,
            layout.positions,
            layout.uses_long_rope,
            layout.slot_mapping,
            layout.logits_indices,
            layout.cu_seqlens_q,
            layout.seq_lens,
        )
    ]
    fault = _describe(
        steps, token_ids, positions, uses_long_rope, slots, rows, query_offsets, lengths, tables,
        table_offsets, is_finite, limits.max_num_tokens, limits.vocab_size, limits.num_slots,
        limits.num_cache_blocks, block_size, pieces,
    )  # fmt: skip
    if fault:
        raise ValueError(f"the layout has {_FAULTS[fault]}")
    return [*arrays, tables, table_offsets]


@kernel
def _describe(
    steps: Any, token_ids: IntArray, positions: IntArray, uses_long_rope: IntArray,
    slots: IntArray, rows: IntArray, query_offsets: IntArray, lengths: IntArray, tables: Any,
    table_offsets: IntArray, is_finite: BoolArray, max_num_tokens: int, vocab_size: int,
    num_slots: int, num_cache_blocks: int, block_size: int, pieces: int,
) -> int:  # fmt: skip
    """The place in `_FAULTS` of the first thing that is wrong; 0: nothing is."""
    num_tokens, num_sequences, num_blocks = len(token_ids), len(lengths), 0
    for sequence in range(num_sequences):
        table_offsets[sequence] = num_blocks
        num_blocks += (lengths[sequence] + block_size - 1) // block_size * pieces
    if num_blocks + TABLE_PADDING * pieces != len(tables):
        return 10
    if not 0 < num_tokens <= max_num_tokens or len(rows) > max_num_tokens:
        return 1
    if len(positions) != num_tokens or len(slots) != num_tokens:
        return 2
    if len(uses_long_rope) != num_tokens:
        return 2
    if len(query_offsets) != num_sequences + 1:
        return 2
    for t in range(num_tokens):
        if not 0 <= token_ids[t] < vocab_size:
            return 3
        if not 0 <= positions[t] < num_slots:
            return 4
        if not 0 <= slots[t] < num_slots:
            return 5
        if not 0 <= uses_long_rope[t] <= 1:
            return 11
    for row in rows:
        if not 0 <= row < num_tokens:
            return 6
    if query_offsets[0] != 0 or query_offsets[num_sequences] != num_tokens:
        return 7
    for sequence in range(num_sequences):
        num_queries = query_offsets[sequence + 1] - query_offsets[sequence]
        if num_queries < 0:
            return 7
        if not num_queries <= lengths[sequence] <= num_slots:
            return 8
    for block in tables:
        if not 0 <= block < num_cache_blocks:
            return 9
    step = steps[0]
    step.num_tokens, step.num_rows, step.num_sequences = num_tokens, len(rows), num_sequences
    step.token_ids, step.positions = token_ids.ctypes.data, positions.ctypes.data
    step.uses_long_rope = uses_long_rope.ctypes.data
    step.slots, step.rows = slots.ctypes.data, rows.ctypes.data
    step.query_offsets, step.lengths = query_offsets.ctypes.data, lengths.ctypes.data
    step.tables, step.table_offsets = tables.ctypes.data, table_offsets.ctypes.data
    step.is_finite = is_finite.ctypes.data
    return 0
