"""What a program of attention computes at a time, and among how many programs K/V is divided."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from verifier.gpu.attention import triton_kernels

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

WIDE_TILES = Tiles(rows=16, keys=32, split_tokens=512, num_stages=3)
"""For heads of more than `WIDE_HEAD_DIM`: of more rows, sums would not fit into registers."""

WIDE_FLOAT32_TILES = Tiles(rows=16, keys=16, split_tokens=512, num_stages=2)
"""Likewise; shared memory has no room for more stages."""

WIDE_HEAD_DIM = 256

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


def tiles_of_step(queries: torch.Tensor, *, is_strict: bool) -> Tiles:
    """The tiles of a step with these queries [num_heads, T, head_dim], padding included."""
    tiles = tiles_of_all_steps(queries.dtype, queries.shape[2], is_strict=is_strict)
    return tiles[-1] if queries.shape[1] <= SMALL_STEP_TOKENS else tiles[0]


def tiles_of_all_steps(dtype: torch.dtype, head_dim: int, *, is_strict: bool) -> tuple[Tiles, ...]:
    """The tiles that `tiles_of_step` may choose, the largest first."""
    if head_dim > WIDE_HEAD_DIM:
        return (WIDE_FLOAT32_TILES if dtype is torch.float32 else WIDE_TILES,)
    if dtype is torch.float32:
        return (FLOAT32_TILES,)
    return (LARGE_TILES,) if is_strict else (LARGE_TILES, SMALL_TILES)
