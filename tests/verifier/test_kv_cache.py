"""The K/V tensors: where writes go, and that failures do not spread through them."""

import dataclasses
from typing import cast

import pytest
import torch

from tests.verifier.paged_model import (
    BLOCK_SIZE,
    Chunk,
    PagedModel,
    keys_and_values,
    make_small_model,
    some_tokens,
)
from verifier.attention.kv_cache import KVCache, KVLayout, KVShape
from verifier.batch.numerics import STRICT

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)
POISON = 96  # the token whose embedding is made non-finite


def make_cache() -> KVCache:
    return KVCache(SHAPE, num_blocks=5, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def test_writes_reach_their_slots_and_layer_alone() -> None:
    cache = make_cache()
    keys, values = torch.randn(2, 3, 6, 4).unbind()
    slots = torch.tensor([33, 34, 35, 7, 0, 79])
    cache.write(1, keys, values, slots)
    for written, expected in zip(keys_and_values(cache, 1, 0, 80), (keys, values), strict=True):
        assert torch.equal(written[:, slots], expected)
        assert written.any(dim=0).any(dim=1).sum() == len(slots), "another slot was written"
    assert not cache.layers[0].any(), "the other layer was written"


def test_the_trash_slot_lies_after_the_pools_blocks() -> None:
    assert make_cache().trash_slot == 5 * BLOCK_SIZE


def test_a_padded_read_of_the_last_block_stays_inside() -> None:
    longest_padding = STRICT.padded_kv_length(193)
    keys, values = keys_and_values(make_cache(), 0, 4 * BLOCK_SIZE, longest_padding)
    assert keys.shape == values.shape == (3, 512, 4)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes(16) == 2 * 2 * 3 * 4 * 16 * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_everything_in_the_cache_stays_finite(bad: float) -> None:
    cache = make_cache()
    keys = torch.full((3, 1, 4), bad)
    cache.write(0, keys, keys, torch.tensor([3]))
    stored, _ = keys_and_values(cache, 0, 0, 80)
    assert torch.isfinite(stored).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_any_value_that_is_not_finite_are_reported(
    bad: float, layout: KVLayout, dtype: torch.dtype
) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    cache = KVCache(
        shape, num_blocks=5, block_size=BLOCK_SIZE, device=torch.device("cpu"), layout=layout
    )
    slots = torch.arange(6)
    # The largest float16 value, which is finite.
    healthy = torch.full((2, 3, 6, 4), 65504.0, dtype=dtype)
    for failing in ((0, 0, 1, 3), (1, 2, 4, 0)):
        for layer in range(2):
            tensors = healthy.clone()
            tensors[failing] = bad
            cache.begin_step()
            cache.write(layer, tensors[0], tensors[1], slots)
            cache.write(1 - layer, healthy[0], healthy[1], slots)
            assert cache.finite_rows().tolist() == [row != failing[2] for row in range(6)]
    both = healthy.clone()
    both[0, 0, 2, :2] = torch.tensor([torch.inf, -torch.inf])
    cache.begin_step()
    cache.write(0, both[0], both[1], slots)
    assert cache.finite_rows().tolist() == [True, True, False, True, True, True]


@pytest.fixture(params=["llama", "phi3"])
def poisoned(request: pytest.FixtureRequest) -> PagedModel:
    """A model with the lean pass, and one with transformers' modules."""
    paged = make_small_model(request.param)
    cast(torch.nn.Embedding, paged.model.get_input_embeddings()).weight[POISON] = torch.nan
    return paged


def chunk(token_ids: list[int], first_block: int, start: int = 0) -> Chunk:
    return Chunk(
        token_ids=token_ids,
        start=start,
        block_table=list(range(first_block, first_block + 8)),
        num_rows=1,
    )


def test_a_failed_sequence_changes_no_bit_of_its_neighbours(poisoned: PagedModel) -> None:
    """In the same step and in later ones; its blocks follow theirs.

    Only last rows have logits, and those of the failed sequence are finite; its K/V is not.
    """
    healthy, other = some_tokens(40, POISON, seed=1), some_tokens(40, POISON, seed=2)
    failing = [*other[:20], POISON, *other[21:]]

    def run(neighbour: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, _ = poisoned.run(chunk(healthy[:30], 0), chunk(neighbour, 2))
        is_finite = poisoned.paged.kv_is_finite
        assert is_finite is not None
        assert is_finite[:30].all(), "a neighbour is blamed"
        first_bad = neighbour.index(POISON) if POISON in neighbour else 40
        assert is_finite[30 : 30 + first_bad].all()
        assert first_bad == 40 or not is_finite[30 + first_bad]
        later = poisoned.run(chunk(healthy[30:32], 0, start=30))[0]
        return rows, later

    for expected, got in zip(run(other), run(failing), strict=True):
        assert torch.equal(expected, got)


def test_blocks_of_a_failed_sequence_are_clean_for_the_next(poisoned: PagedModel) -> None:
    token_ids = some_tokens(20, POISON)
    expected = poisoned.run(chunk(token_ids, 0))[0]
    poisoned.run(chunk([POISON] * 100, 0))
    assert torch.equal(poisoned.run(chunk(token_ids, 0))[0], expected)
