"""The K/V tensors: where writes go, and that failures do not spread through them."""

import dataclasses
from typing import cast

import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.paged_model import BLOCK_SIZE, PagedModel, make_small_model, some_tokens
from verifier.attention.kv_cache import KVCache, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)
POISON = 96  # the token whose embedding is made non-finite


def make_cache() -> KVCache:
    return KVCache(SHAPE, num_blocks=5, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def test_writes_reach_their_slots_and_layer_alone() -> None:
    cache = make_cache()
    keys, values = torch.randn(2, 3, 6, 4).unbind()
    slots = torch.tensor([33, 34, 35, 7, 0, 79])
    cache.write(1, keys, values, slots)
    for blocks, gathered, written in zip(
        cache.blocks(1), cache.gathered(1, slots), (keys, values), strict=True
    ):
        assert blocks.shape == (5, BLOCK_SIZE, 3, 4)
        for row, slot in enumerate(slots.tolist()):
            assert torch.equal(blocks[slot // BLOCK_SIZE, slot % BLOCK_SIZE], written[:, row])
        assert torch.equal(gathered, written.transpose(0, 1))
        assert blocks.any(dim=3).any(dim=2).sum() == len(slots), "another slot was written"
    assert not any(blocks.any() for blocks in cache.blocks(0)), "the other layer was written"


@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 4), (3, 8)])
def test_heads_of_another_shape_than_the_configuration_tells_are_refused(
    num_heads: int, head_dim: int
) -> None:
    good, bad = torch.randn(3, 6, 4), torch.randn(num_heads, 6, head_dim)
    told = f"values of {num_heads} heads of {head_dim}, where the configuration tells 3 heads of 4"
    with pytest.raises(ValueError, match=told):
        make_cache().write(0, good, bad, torch.arange(6))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_any_value_that_is_not_finite_are_reported(
    bad: float, dtype: torch.dtype
) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    cache = KVCache(shape, num_blocks=5, block_size=BLOCK_SIZE, device=torch.device("cpu"))
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


@pytest.fixture
def poisoned() -> PagedModel:
    paged = make_small_model("llama")
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
        is_finite = poisoned.kv_is_finite
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
