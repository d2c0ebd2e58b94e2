"""How many programs the `triton` backend launches, and over what: no kernel runs."""

import importlib.util
import math
from typing import Any

import pytest
import torch

from verifier.attention.backend import DeviceTables

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton (extra dev), and it is not installed here",
)
META = torch.device("meta")
BUCKETS = (8, 16, 24, 32, 64, 96, 288, 512, 2048)


class Launches:
    """Stands in for a kernel: notes grids and arguments."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[tuple[Any, ...]] = []
        # Whether programs may share a tile's splits.
        self.are_split: list[bool] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grids.append(grid)
            self.arguments.append(arguments)
            self.are_split.append(constants.get("IS_SPLIT", False))

        return launch


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> Launches:
    from verifier.gpu.attention import triton_kernels

    launches = Launches()
    monkeypatch.setattr(triton_kernels, "attend", launches)
    monkeypatch.setattr(triton_kernels, "combine", Launches())
    return launches


def attend(
    num_tokens: int,
    *,
    longest_k: int,
    num_heads: int = 32,
    sliding_window: int | None = None,
    device: torch.device = META,
) -> None:
    """A step of a graph: as many entries as tokens; of sizes that lengths do not change."""
    from verifier.gpu.attention.tiles import Splitting, tiles_of_step
    from verifier.gpu.attention.triton_paged import paged_attention

    indices = torch.empty(num_tokens, dtype=torch.int32, device=device)
    num_kv_heads = 8 if num_heads == 32 else 2
    blocks = torch.empty((1, 16, num_kv_heads, 128), dtype=torch.bfloat16, device=device)
    queries = torch.empty((num_heads, num_tokens, 128), dtype=torch.bfloat16, device=device)
    paged_attention(
        queries,
        blocks,
        blocks,
        DeviceTables(
            counts=torch.empty(3, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.empty(num_tokens + 1, dtype=torch.int32, device=device),
            seq_lens=indices,
            table_rows=indices,
            block_tables=indices[None],
            slot_mapping=indices,
            longest_k=longest_k,
        ),
        tiles=tiles_of_step(queries, is_strict=False),
        scaling=1.0,
        sliding_window=sliding_window,
        splitting=Splitting(),
    )


@pytest.mark.parametrize("longest_k", [1024, 4096, 32_768, 131_072])
def test_the_longest_length_does_not_multiply_programs(attends: Launches, longest_k: int) -> None:
    """All but a few of them have nothing to do if sequences are short, or few."""
    for num_tokens in BUCKETS:
        attend(num_tokens, longest_k=longest_k)
        grid, tokens_per_tile = attends.grids[-1], 4 if num_tokens <= 8 else 16
        num_tiles = num_tokens // tokens_per_tile + num_tokens
        assert num_tiles <= grid[0] <= num_tiles * -(-longest_k // 256), num_tokens
        assert math.prod(grid) <= max(2048, 8 * num_tiles), num_tokens


def test_a_step_that_may_be_of_few_sequences_is_split(attends: Launches) -> None:
    """96 tokens may be 8 sequences with drafts, so 64 programs of this model have work."""
    for num_tokens in (8, 24, 64, 96):
        attend(num_tokens, longest_k=4096)
        assert attends.are_split[-1], num_tokens
    attend(512, longest_k=4096)
    assert not attends.are_split[-1], "256 have work at least"


def test_kernels_are_compiled_at_the_first_step_only(attends: Launches) -> None:
    """Of each kind of layer; a layer launches those of its own step alone."""
    from verifier.gpu.attention.triton_backend import TritonBackend

    backend = TritonBackend(device=META)
    queries = torch.empty((32, 7, 64), dtype=torch.bfloat16, device=META)
    blocks = torch.empty((100, 16, 8, 64), dtype=torch.bfloat16, device=META)
    counts = []
    for window in (None, None, 64, 64, None):
        backend.compile(queries, blocks, blocks, sliding_window=window, has_softcap=False)
        counts.append(len(attends.grids))
    # By one program and by several, in tiles of each shape.
    assert counts == [4, 4, 8, 8, 8]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_steps_of_few_tokens_have_small_tiles(dtype: torch.dtype, is_strict: bool) -> None:
    """And never under strict numerics."""
    from verifier.gpu.attention.tiles import FLOAT32_TILES, LARGE_TILES, SMALL_TILES, tiles_of_step

    for num_tokens, is_small in ((1, True), (8, True), (9, False), (512, False)):
        queries = torch.empty((32, num_tokens, 128), dtype=dtype, device=META)
        tiles = tiles_of_step(queries, is_strict=is_strict)
        if dtype is torch.float32:
            assert tiles is FLOAT32_TILES
        else:
            assert tiles is (SMALL_TILES if is_small and not is_strict else LARGE_TILES)


@pytest.mark.parametrize(("split_tokens", "num_equal"), [(1, 1), (16, 2), (48, 3), (256, 32)])
def test_splits_follow_one_another_and_double_in_size(split_tokens: int, num_equal: int) -> None:
    from verifier.gpu.attention import triton_kernels

    sizes = [split_tokens << (split // num_equal) for split in range(4 * num_equal)]
    first = 0
    for split, size in enumerate(sizes):
        assert triton_kernels.start_of.fn(split, split_tokens, num_equal) == first
        for position in {first, first + size // 2, first + size - 1}:
            assert triton_kernels.split_at.fn(position, split_tokens, num_equal) == split
        first += size


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (0, [1, 1, 1, 2, 32, 33, 100]),
        # A split more, since a window may begin in the midst of one.
        (1, [1, 1, 1, 2, 2, 2, 2]),
        (1024, [1, 1, 1, 2, 4, 4, 4]),
        (16_384, [1, 1, 1, 2, 32, 33, 34]),
        # A long window's splits grow, too.
        (16_385, [1, 1, 1, 2, 32, 33, 100]),
    ],
)
def test_a_tile_reads_few_splits(window: int, expected: list[int]) -> None:
    """And one at least: tables of padding alone have a longest length of zero."""
    from verifier.gpu.attention.tiles import LARGE_TILES, Splitting

    lengths = (0, 1, 512, 513, 16_384, 16_385, 131_072)
    splits = [
        Splitting().splits(each, LARGE_TILES, window=window, tile_tokens=16) for each in lengths
    ]
    assert [each.most_read for each in splits] == expected
    assert all((each.num_equal == 32) == (window not in (1, 1024, 16_384)) for each in splits)
