"""Paged attention by kernels of our own in Triton: for GPUs, with any power of two as block size.

Decodes, verified drafts and prefill chunks go through one kernel with one shape of tiles, in one
launch per layer (two, where a sequence's K/V is read by several programs). `triton_kernels.py` says
why a row's bits depend on its own sequence alone.

Never measured: tile shapes and limits here are chosen by reading.
"""

import contextlib
import math
from dataclasses import dataclass

import torch

from verifier.attention import triton_kernels
from verifier.attention.backend import to_device
from verifier.attention.block_table import StepTables, tables_of
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout

SPLIT_TOKENS = 512
"""Tokens per split of a sequence's K/V; changing it changes bits."""

MIN_TILE_ROWS = 64
"""Rows per tile; a tensor core of Hopper takes 64 at least. Far fewer would do for a decode, whose
speed is that of reading K/V; the same number everywhere gives the same bits everywhere.
"""

ENOUGH_PROGRAMS = 512
"""As many keep a GPU busy; only with fewer, several programs share a sequence's K/V."""

MAX_WORKSPACE_BYTES = 128 << 20
"""Of the results of splits; where they would take more, one program goes through all splits."""

_COMBINED_HEADS = 4
_UNROLLED_SPLITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How K/V is divided; the defaults are for GPUs. Of these, only `split_tokens` changes bits."""

    split_tokens: int = SPLIT_TOKENS
    enough_programs: int = ENOUGH_PROGRAMS
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES


class TritonBackend:
    """Owned by the engine thread."""

    name = "triton"

    def __init__(self, *, device: torch.device, splitting: Splitting | None = None) -> None:
        self.device = device
        self.splitting = splitting or Splitting()

    def prepare(self, layout: BatchLayout, cache: KVCache) -> "TritonStep":
        """Rows of the layout past its last sequence are padding, and so are slots under zero."""
        return TritonStep(
            cache,
            slot_mapping=to_device(layout.slot_mapping, self.device),
            tables=tables_of(layout, self.device),
            splitting=self.splitting,
        )


class TritonStep:
    """Attention of one step. Its tensors may be filled anew between replays of a captured step, as
    long as `tables.longest_k` bounds every sequence's length.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        slot_mapping: torch.Tensor,
        tables: StepTables,
        splitting: Splitting,
    ) -> None:
        """`slot_mapping`: [T] int64."""
        self._cache = cache
        self._slot_mapping = slot_mapping
        self._tables = tables
        self._splitting = splitting

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
        cached_keys, cached_values = self._cache.blocks(layer)
        # Triton launches on the thread's current device.
        with torch.cuda.device(queries.device) if queries.is_cuda else contextlib.nullcontext():
            self._cache.add_row_sums(
                write(keys, values, self._slot_mapping, cached_keys, cached_values)
            )
            return paged_attention(
                queries,
                cached_keys,
                cached_values,
                self._tables,
                scaling=scaling,
                sliding_window=sliding_window,
                splitting=self._splitting,
            )


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
) -> torch.Tensor:
    """Stores K and V [num_kv_heads, T, head_dim], what is not finite as zero.

    Args:
        slot_mapping: [T] int64; rows with a negative slot are not stored.
        cached_keys, cached_values: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.

    Returns:
        The sum of each row's values [T] float32, as `KVCache.add_row_sums` takes it.
    """
    keys, values = _with_adjacent_dims(keys), _with_adjacent_dims(values)
    num_kv_heads, num_rows, head_dim = keys.shape
    row_sums = torch.empty(num_rows, dtype=torch.float32, device=keys.device)
    if num_rows:
        triton_kernels.write_kv[(num_rows,)](
            keys,
            values,
            slot_mapping,
            cached_keys,
            cached_values,
            row_sums,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            NUM_KV_HEADS=num_kv_heads,
            DIM=head_dim,
            HEADS=_power_of_two(num_kv_heads),
            DIMS=_power_of_two(head_dim),
        )
    return row_sums


def paged_attention(
    queries: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    tables: StepTables,
    *,
    scaling: float,
    sliding_window: int | None,
    splitting: Splitting,
) -> torch.Tensor:
    """Causal attention of queries [num_heads, T, head_dim] to K/V in blocks.

    Args:
        cached_keys, cached_values: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        tables: `longest_k` bounds the lengths; all else is read on the device.

    Returns:
        [T, num_heads, head_dim]; rows that are no sequence's are left uninitialized.
    """
    queries = _with_adjacent_dims(queries)
    num_heads, num_rows, head_dim = queries.shape
    block_size, num_kv_heads = cached_keys.shape[1:3]
    num_sequences = len(tables.seq_lens)
    group = num_heads // num_kv_heads
    tile_rows = max(MIN_TILE_ROWS, _power_of_two(group))
    tile_tokens = tile_rows // group
    num_tiles = num_rows // tile_tokens + num_sequences
    num_splits = max(-(-tables.longest_k // splitting.split_tokens), 1)
    partial_shape = (num_rows, num_heads, num_splits)
    is_split = (
        num_splits > 1
        and num_tiles * num_kv_heads < splitting.enough_programs
        and math.prod(partial_shape) * (head_dim + 2) * 4 <= splitting.max_workspace_bytes
    )
    output = queries.new_empty((num_rows, num_heads, head_dim))
    if not num_rows or not num_sequences:
        return output
    if is_split:
        tops, totals = queries.new_empty((2, *partial_shape), dtype=torch.float32)
        sums = queries.new_empty((*partial_shape, head_dim), dtype=torch.float32)
    else:
        tops = totals = sums = output  # never used
    window = sliding_window or 0
    dims = max(_power_of_two(head_dim), 16)
    # A product and a sum, each rounded, wherever a split is folded: else the compiler might fuse
    # them in one of the kernels only.
    options = {"enable_fp_fusion": False}
    triton_kernels.attend[(num_tiles, num_kv_heads, num_splits if is_split else 1)](
        queries,
        cached_keys,
        cached_values,
        tables.block_table,
        tables.cu_seqlens_q,
        tables.seq_lens,
        output,
        tops,
        totals,
        sums,
        queries.stride(0),
        queries.stride(1),
        tables.block_table.stride(0),
        num_sequences,
        scaling * math.log2(math.e),
        window,
        num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=head_dim,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows,
        TILE_TOKENS=tile_tokens,
        TILE_KEYS=min(_tile_keys(dims, queries.dtype), splitting.split_tokens),
        SPLIT=splitting.split_tokens,
        IS_SPLIT=is_split,
        HAS_WINDOW=window > 0,
        num_warps=4 if dims <= 128 else 8,
        num_stages=2,
        **options,
    )
    if is_split:
        triton_kernels.combine[(num_rows, -(-num_heads // _COMBINED_HEADS))](
            tops,
            totals,
            sums,
            tables.cu_seqlens_q,
            tables.seq_lens,
            output,
            num_sequences,
            window,
            num_splits,
            NUM_HEADS=num_heads,
            DIM=head_dim,
            HEADS=_COMBINED_HEADS,
            DIMS=dims,
            SPLIT=splitting.split_tokens,
            UNROLLED=_UNROLLED_SPLITS,
            HAS_WINDOW=window > 0,
            num_warps=4,
            **options,
        )
    return output


def _tile_keys(dims: int, dtype: torch.dtype) -> int:
    """Keys per tile: K and V of two stages fit in the shared memory of every GPU from Ampere on."""
    return max(16, min(64, 16384 // (dims * dtype.itemsize)))


def _with_adjacent_dims(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << (number - 1).bit_length()
