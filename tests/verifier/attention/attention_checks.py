"""The `triton` backend's kernels in Triton's interpreter (`test_in_the_interpreter.py`);
tests/gpu/test_attention.py runs the same on a GPU.

bfloat16 is computed here by a product that stands in for the interpreter's own
(`triton_interpreter.py`), so it checks what surrounds the products only.
"""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.verifier.triton import triton_cases
from tests.volume import cases
from verifier.attention.backend import DeviceTables, device_tables
from verifier.gpu.attention.tiles import FLOAT32_TILES
from verifier.gpu.attention.triton_paged import paged_attention

# numpy, which computes in the interpreter, warns of infinities; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ALL_TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("seed", cases(range(1, 7), range(10)))
def test_attention_is_that_of_the_definition(seed: int) -> None:
    triton_cases.attention_is_that_of_the_definition(seed, ALL_TYPES[seed % 3])


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize(
    "case",
    [
        "large_scores_do_not_overflow",
        "what_is_written_is_that_of_the_cache",
    ],
)
def test_of_every_type(case: str, dtype: torch.dtype) -> None:
    getattr(triton_cases, case)(dtype)


# The interpreter computes all types in float32; tiles of 16-bit ones have more rows.
@pytest.mark.parametrize("dtype", cases([torch.bfloat16], ALL_TYPES))
@pytest.mark.parametrize(
    "case",
    [
        "a_softcap_is_that_of_the_definition",
        "sinks_are_those_of_the_definition",
        "wide_heads_are_those_of_the_definition",
        "padding_changes_no_bit",
        "bits_do_not_depend_on_the_batch",
    ],
)
def test_of_one_type(case: str, dtype: torch.dtype) -> None:
    getattr(triton_cases, case)(dtype)


@pytest.mark.parametrize(
    ("num_padded", "max_programs", "products"),
    [
        # A program for each split, the last ones first, though half of the entries are padding.
        (2, 8, {0: 4, 2: 4, 4: 2, 6: 2, 5: 2, 7: 2}),
        # Two for each sequence, which take every second split. The fifth has nothing to do.
        (0, 5, {0: 6, 2: 6, 1: 2, 3: 2}),
    ],
)
def test_a_steps_programs_share_its_splits(
    num_padded: int, max_programs: int, products: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same whichever program computes a split, so each program's products are
    counted: two for 32 keys. The sequences' splits have 32, 32, 64 and 64 tokens, and 32 and 8.
    """
    world = triton_cases.World(
        triton_cases.Sizes(num_kv_heads=1),
        [triton_cases.Entry(num_queries=1, length=length) for length in (192, 40)],
    )
    queries, keys, values = world.rows()
    world.cache.write(1, keys, values, torch.from_numpy(world.layout.slot_mapping))
    counted: Counter[int] = Counter()
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, *arguments: Any) -> Any:
        counted[self.grid_idx[0]] += 1
        return multiply(self, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    attended = paged_attention(
        queries,
        *world.cache.blocks(1),
        padded(device_tables(world.layout, world.device), num_padded),
        tiles=FLOAT32_TILES,
        scaling=0.3,
        sliding_window=None,
        splitting=dataclasses.replace(triton_cases.APART, max_programs=max_programs),
    )
    world.check(attended)
    assert counted == products


def padded(tables: DeviceTables, num_padded: int) -> DeviceTables:
    """With so many entries more that are padding."""

    def extended(indices: torch.Tensor) -> torch.Tensor:
        return torch.cat((indices, indices.new_full((num_padded,), 1 << 30)))

    return dataclasses.replace(
        tables,
        cu_seqlens_q=extended(tables.cu_seqlens_q),
        seq_lens=extended(tables.seq_lens),
        table_rows=extended(tables.table_rows),
    )


@pytest.mark.parametrize(
    "case",
    [
        "a_sequence_may_end_where_a_split_does",
        "more_heads_may_share_kv_than_a_tile_has_rows",
        "a_step_reads_its_indices_at_every_launch",
        "a_cache_may_have_more_values_than_int32_counts",
    ],
)
def test_in_float32(case: str) -> None:
    getattr(triton_cases, case)()


def test_the_default_splits_are_right() -> None:
    triton_cases.the_default_splits_are_right(torch.float16)
