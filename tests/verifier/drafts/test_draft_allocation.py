"""The allocation of a step's drafts, against all allocations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volume import examples
from verifier.drafts.draft_allocation import allocate

MAX_DEPTH = 4
Depths = tuple[int, ...]


def allocated(survivals: np.ndarray, decode_costs: np.ndarray, costs: np.ndarray) -> Depths:
    depths = np.full(len(survivals), -1, dtype=np.int64)
    allocate(survivals, float(len(survivals)), decode_costs, costs, depths)
    return tuple(depths.tolist())


# Products of four are never below the least that is verified.
probabilities = st.floats(0.33, 1.0) | st.sampled_from([0.5, 0.9, 1.0])
rises = st.floats(0.0, 3.0) | st.sampled_from([0.0, 1.0])


@settings(max_examples=examples(400))
@given(
    rows=st.lists(
        st.lists(probabilities, min_size=MAX_DEPTH, max_size=MAX_DEPTH), min_size=1, max_size=3
    ),
    limits=st.lists(st.integers(0, MAX_DEPTH), min_size=3, max_size=3),
    max_drafts=st.integers(0, 12),
    first=st.floats(0.1, 5.0),
    steps=st.lists(rises, min_size=12, max_size=12),
    chunk_steps=st.none() | st.lists(rises, min_size=13, max_size=13),
)
def test_no_other_allocation_is_worth_more(
    rows: list[list[float]],
    limits: list[int],
    max_drafts: int,
    first: float,
    steps: list[float],
    chunk_steps: list[float] | None,
) -> None:
    """Without chunks, in tokens per second; with them, in tokens above the best rate without."""
    survivals = np.cumprod(np.array(rows), axis=1)
    for row, limit in zip(survivals, limits, strict=False):
        row[limit:] = 0.0
    decode_costs = np.cumsum([first, *steps])[: max_drafts + 1]
    costs = decode_costs if chunk_steps is None else np.cumsum(chunk_steps)[: max_drafts + 1]
    found = allocated(survivals, decode_costs, costs)

    def tokens(depths: Depths) -> float:
        sums = [float(row[:depth].sum()) for row, depth in zip(survivals, depths, strict=True)]
        return len(rows) + sum(sums)

    allowed = [
        depths
        for depths in itertools.product(
            *(range(limit + 1) for limit in limits[: len(rows)]),
        )
        if sum(depths) <= max_drafts
    ]
    assert found in allowed
    best_rate = max(tokens(depths) / decode_costs[sum(depths)] for depths in allowed)
    worth = {depths: tokens(depths) - best_rate * costs[sum(depths)] for depths in allowed}
    assert worth[found] == pytest.approx(max(worth.values()), rel=1e-9, abs=1e-9)
    if chunk_steps is None:
        assert tokens(found) / costs[sum(found)] == pytest.approx(best_rate, rel=1e-9)


def test_the_example_of_the_module() -> None:
    survivals = np.array([[0.9, 0.8, 0.0, 0.0], [0.5, 0.1, 0.0, 0.0]])
    costs = np.arange(6.0, 14.0)
    assert allocated(survivals, costs, costs) == (2, 1)


def test_of_equal_drafts_a_sequences_first_ones_are_taken_and_unlikely_ones_never() -> None:
    free = np.ones(9)
    assert allocated(np.array([[0.5] * 4, [0.5] * 4]), free[:4], free[:4]) in ((3, 0), (2, 1))
    assert allocated(np.array([[0.5, 0.009, 0.009, 0.009]]), free, free) == (1,)
