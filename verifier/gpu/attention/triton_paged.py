"""Paged attention by kernels of our own in Triton: for GPUs, with any power of two as block size.

Decodes, verified drafts and prefill chunks go through one kernel, in one launch per layer (two,
where a sequence's K/V is read by several programs). `triton_kernels.py` says why a row's bits
depend on its own sequence alone, as long as the tiles are of one shape.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verifier.attention.backend import DeviceTables, device_tables
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout
from verifier.gpu.attention import triton_kernels
from verifier.gpu.kernels.overlapping_kernels import can_overlap, overlap_options

ENOUGH_PROGRAMS = 512
"""So many programs keep a GPU busy; only with fewer, several programs share a sequence's K/V."""

MAX_PROGRAMS = 2048
"""Of a launch in which several may share K/V. A captured one has as many for any step, and they are
divided among the tiles that the step has: more would have to be started, too, and find nothing to
do.
"""

MAX_WORKSPACE_BYTES = 256 << 20
"""For the results of splits; where they would take more, one program goes through all splits."""

EQUAL_SPLITS = 32
"""So many splits of a sequence have the tiles' `split_tokens`, as many after them twice as many
tokens, and so on: a long sequence has splits enough for all programs. With 256 equal ones, the
results of 32 drafts took a quarter of the K/V's memory, and had to be written and read.
"""

# As `num_equal`: no text is longer than so many splits.
_ALL_EQUAL = 1 << 20
_COMBINED_HEADS = 4
_UNROLLED_SPLITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What a program computes at a time. Other tiles, other bits.

    Attributes:
        rows: of queries. 64 is the least that Hopper's matrix instructions take, 16 that of older
            ones, which Hopper has, too.
        keys: at most; fewer where shared memory is short.
        split_tokens: of a sequence's K/V, reduced by themselves; more from `EQUAL_SPLITS` on.
    """

    rows: int
    keys: int
    split_tokens: int
    num_stages: int


LARGE_TILES = Tiles(rows=64, keys=64, split_tokens=512, num_stages=3)
"""For drafts and chunks of many sequences. With fewer stages, loads of block ids are not pipelined,
and each tile of keys waits for its own."""

SMALL_TILES = Tiles(rows=16, keys=128, split_tokens=256, num_stages=2)
"""For a few tokens. More programs fit on a multiprocessor, and a single sequence has more of them,
so more reads of K/V are under way."""

FLOAT32_TILES = Tiles(rows=16, keys=64, split_tokens=512, num_stages=3)
"""No tensor core multiplies float32 exactly."""

SMALL_STEP_TOKENS = 8
"""A step that has no more tokens is computed in small tiles. More may be drafts of one sequence,
whose K/V each small tile reads again: docs/decisions/triton-attention.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """Among how many programs K/V is divided; the defaults are for GPUs. Of it, `split_tokens` and
    `equal_splits` change bits.

    Attributes:
        split_tokens: None: those of the tiles.
    """

    split_tokens: int | None = None
    equal_splits: int = EQUAL_SPLITS
    enough_programs: int = ENOUGH_PROGRAMS
    max_programs: int = MAX_PROGRAMS
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES

    def splits(self, longest_k: int, tiles: Tiles, *, window: int, tile_tokens: int) -> "Splits":
        """Of sequences with so many tokens at most.

        Args:
            window: tokens that a token sees; 0: all before it.
            tile_tokens: of a tile's queries.
        """
        tokens = self.split_tokens or tiles.split_tokens
        if 0 < window <= self.equal_splits * tokens:
            # Few are read wherever the window is, so they need not grow.
            most_read = -(-(window + tile_tokens) // tokens) + 1
            return Splits(tokens, _ALL_EQUAL, max(1, min(most_read, -(-longest_k // tokens))))
        # As a function of Python, not as a kernel.
        last: int = triton_kernels.split_at.fn(max(longest_k - 1, 0), tokens, self.equal_splits)
        return Splits(tokens, self.equal_splits, last + 1)


class Splits(NamedTuple):
    """How K/V is divided.

    Attributes:
        tokens: of each of the first `num_equal` splits; as many after them have twice as many.
        most_read: the most splits that a tile reads.
    """

    tokens: int
    num_equal: int
    most_read: int


class TritonBackend:
    """Owned by the engine thread."""

    name = "triton"
    # `TritonStep.attend` takes `softcap`.
    caps_scores = True

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
        # For which layers all kernels are compiled: by window, and with a softcap or without.
        self._compiled: set[tuple[int | None, bool]] = set()

    @functools.cached_property
    def overlaps(self) -> bool:
        """Whether kernels begin so. Asks the device's driver, if nobody said it."""
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
    ) -> None:
        """At the first step, which is the check of the model when it is loaded, runs the kernels of
        one program per sequence and those of several, for one token, in tiles of each shape, as
        steps of few rows launch them and of many. So no request waits for the compiler.
        """
        if (sliding_window, has_softcap) in self._compiled:
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
        all_tiles = tiles_of_all_steps(queries.dtype, is_strict=self.is_strict)
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
                splitting=dataclasses.replace(self.splitting, enough_programs=enough_programs),
                overlaps=overlaps,
            )
        self._compiled.add((sliding_window, has_softcap))


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
    ) -> torch.Tensor:
        """`softcap`: scores s become softcap * tanh(s / softcap); 0: they stay as they are."""
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
                splitting=self._backend.splitting,
                overlaps=self._backend.overlaps,
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
            enable_fp_fusion=False,
        )
    return row_sums


def tiles_of_step(queries: torch.Tensor, *, is_strict: bool) -> Tiles:
    """The tiles of a step with these queries [num_heads, T, head_dim], padding included."""
    tiles = tiles_of_all_steps(queries.dtype, is_strict=is_strict)
    return tiles[-1] if queries.shape[1] <= SMALL_STEP_TOKENS else tiles[0]


def tiles_of_all_steps(dtype: torch.dtype, *, is_strict: bool) -> tuple[Tiles, ...]:
    """The tiles that `tiles_of_step` may choose, the largest first."""
    if dtype is torch.float32:
        return (FLOAT32_TILES,)
    return (LARGE_TILES,) if is_strict else (LARGE_TILES, SMALL_TILES)


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
    splitting: Splitting,
    overlaps: bool = False,
) -> torch.Tensor:
    """Causal attention of queries [num_heads, T, head_dim] to K/V in blocks.

    Args:
        cached_keys, cached_values: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        tables: `longest_k` bounds the lengths; all else is read on the device.
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
