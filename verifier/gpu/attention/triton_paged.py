"""Launches of the kernels of paged attention.

Decodes, verified drafts and prefill chunks go through one kernel, in one launch per layer (two,
where a sequence's K/V is read by several programs). `triton_kernels.py` says why a row's bits
depend on its own sequence alone, as long as the tiles are of one shape.
"""

import math
from typing import Any

import torch

from verifier.attention.backend import DeviceTables
from verifier.gpu.attention import triton_kernels
from verifier.gpu.attention.tiles import Splitting, Tiles
from verifier.gpu.kernels.overlapping_kernels import overlap_options

_COMBINED_HEADS = 4
_UNROLLED_SPLITS = 8


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
            enable_fp_fusion=False,
        )
    return row_sums


def paged_attention(
    queries: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    tables: DeviceTables,
    *,
    tiles: Tiles,
    scaling: float,
    sliding_window: int | None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    splitting: Splitting,
    overlaps: bool = False,
) -> torch.Tensor:
    """Causal attention of queries [num_heads, T, head_dim] to K/V in blocks.

    Args:
        cached_keys, cached_values: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        tables: `longest_k` bounds the lengths; all else is read on the device.
        sinks: [num_heads] float32, logits of a token without a value, which every token sees.
        overlaps: kernels begin as `overlapping_kernels.py` says.

    Returns:
        [T, num_heads, head_dim]; rows that are no sequence's are left uninitialized.
    """
    queries = _with_adjacent_dims(queries)
    num_heads, num_rows, head_dim = queries.shape
    block_size, num_kv_heads = cached_keys.shape[1:3]
    num_sequences = len(tables.seq_lens)
    output = queries.new_empty((num_rows, num_heads, head_dim))
    if not num_rows or not num_sequences:
        return output
    group = num_heads // num_kv_heads
    tile_rows = max(tiles.rows, _power_of_two(group))
    tile_tokens = tile_rows // group
    num_tiles = num_rows // tile_tokens + num_sequences
    window = sliding_window or 0
    splits = splitting.splits(tables.longest_k, tiles, window=window, tile_tokens=tile_tokens)
    partial_shape = (num_rows, num_heads, splits.most_read)
    # Entries may be padding: there are no fewer tiles with queries than one sequence has.
    fewest_tiles = max(num_rows // tile_tokens, 1)
    # For each a top, a total and a sum of values, in float32.
    workspace_bytes = 4 * math.prod(partial_shape) * (head_dim + 2)
    is_split = (
        splits.most_read > 1
        and fewest_tiles * num_kv_heads < splitting.enough_programs
        and 2 * num_tiles * num_kv_heads <= splitting.max_programs
        and workspace_bytes <= splitting.max_workspace_bytes
    )
    programs_per_head = num_tiles
    if is_split:
        most_programs = splitting.max_programs // num_kv_heads
        programs_per_head = min(num_tiles * splits.most_read, most_programs)
        # Each by itself, so that all begin at multiples of 16 bytes: Triton compiles for that.
        tops = queries.new_empty(partial_shape, dtype=torch.float32)
        totals = torch.empty_like(tops)
        sums = queries.new_empty((*partial_shape, head_dim), dtype=torch.float32)
    else:
        tops = totals = sums = output  # never used
    dims = max(_power_of_two(head_dim), 16)
    # Products and sums are rounded each, wherever a split is folded: else the compiler might fuse
    # them in one of the kernels only.
    options: dict[str, Any] = {
        "enable_fp_fusion": False,
        "num_warps": 4 if dims <= 128 else 8,
        **overlap_options(overlaps, num_rows),
    }
    triton_kernels.attend[(programs_per_head, num_kv_heads)](
        queries,
        cached_keys,
        cached_values,
        tables.block_tables,
        tables.table_rows,
        tables.counts,
        tables.cu_seqlens_q,
        tables.seq_lens,
        sinks,
        output,
        tops,
        totals,
        sums,
        queries.stride(0),
        queries.stride(1),
        tables.block_tables.stride(0),
        # With a softcap, of the argument of tanh.
        scaling / softcap if softcap else scaling * math.log2(math.e),
        softcap * math.log2(math.e),
        window,
        splits.most_read,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=head_dim,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows,
        TILE_TOKENS=tile_tokens,
        TILE_KEYS=min(_tile_keys(tiles, dims, queries.dtype), splits.tokens),
        SPLIT=splits.tokens,
        NUM_EQUAL=splits.num_equal,
        IS_SPLIT=is_split,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_SINKS=sinks is not None,
        num_stages=tiles.num_stages,
        **options,
    )
    if is_split:
        triton_kernels.combine[(num_rows, -(-num_heads // _COMBINED_HEADS))](
            tops,
            totals,
            sums,
            tables.counts,
            tables.cu_seqlens_q,
            tables.seq_lens,
            sinks,
            output,
            window,
            splits.most_read,
            NUM_HEADS=num_heads,
            DIM=head_dim,
            HEADS=_COMBINED_HEADS,
            DIMS=dims,
            SPLIT=splits.tokens,
            NUM_EQUAL=splits.num_equal,
            UNROLLED=_UNROLLED_SPLITS,
            HAS_WINDOW=window > 0,
            HAS_SINKS=sinks is not None,
            **options,
        )
    return output


def _tile_keys(tiles: Tiles, dims: int, dtype: torch.dtype) -> int:
    """Keys per tile: K and V of two stages fit in the shared memory of every GPU from Ampere on."""
    most_bytes = 16384 if tiles.num_stages > 2 else 32768
    return max(16, min(tiles.keys, most_bytes // (dims * dtype.itemsize)))


def _with_adjacent_dims(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << (number - 1).bit_length()
