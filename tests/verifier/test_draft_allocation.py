"""The allocation of a step's drafts, against all allocations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volume import examples
from verifier.drafts.draft_allocation import allocate
from verifier.drafts.step_cost import cost_of_rows

MAX_DEPTH = 4
KNOTS = np.array([1, 3, 4, 6, 7, 50], dtype=np.int64)


class Step:
    """Straight from the definitions; what allocations have in common is computed once."""

    def __init__(
        self,
        survivals: np.ndarray,
        coefficients: np.ndarray,
        num_rows: int,
        cost: float,
        cost_per_draft: float = 0.0,
    ) -> None:
        # By depth.
        self._sums: list[list[float]] = [
            [0.0, *itertools.accumulate(row.tolist())] for row in survivals
        ]
        # By the number of drafts.
        self._costs: list[float] = [
            cost
            + cost_per_draft * drafts
            + cost_of_rows(KNOTS, coefficients, float(num_rows + drafts))
            for drafts in range(MAX_DEPTH * len(survivals) + 1)
        ]

    def expected(self, depths: tuple[int, ...]) -> float:
        """Tokens."""
        sums = [sums[depth] for sums, depth in zip(self._sums, depths, strict=True)]
        return len(sums) + sum(sums)

    def cost(self, depths: tuple[int, ...]) -> float:
        return self._costs[sum(depths)]

    def rate(self, depths: tuple[int, ...]) -> float:
        """Expected tokens over the cost."""
        return self.expected(depths) / self.cost(depths)


def allocated(
    survivals: np.ndarray,
    limits: list[int],
    max_drafts: int,
    coefficients: np.ndarray,
    num_rows: int,
    cost: float,
    cost_per_draft: float,
    probe_factor: float = 1.0,
    num_instead_of_none: int = 0,
    num_chunk_rows: float = 0.0,
    chunk_cost: float = 0.0,
) -> tuple[int, ...]:
    depths = np.full(len(limits), -1, dtype=np.int64)
    allocate(
        survivals, np.array(limits, dtype=np.int64), max_drafts, KNOTS, coefficients,
        float(len(limits)), float(num_rows), cost, num_rows + num_chunk_rows, cost + chunk_cost,
        cost_per_draft, probe_factor, num_instead_of_none, depths,
    )  # fmt: skip
    return tuple(depths.tolist())


# Products of four are never below the least that is verified.
probabilities = st.floats(0.33, 1.0) | st.sampled_from([0.5, 0.9, 1.0])
costs = st.floats(0.0, 3.0) | st.sampled_from([0.0, 1.0])


@settings(max_examples=examples(400))
@given(
    rows=st.lists(st.lists(probabilities, min_size=MAX_DEPTH, max_size=MAX_DEPTH), max_size=3),
    limits=st.lists(st.integers(0, MAX_DEPTH), min_size=3, max_size=3),
    max_drafts=st.integers(0, 12),
    slopes=st.lists(costs, min_size=len(KNOTS) + 3, max_size=len(KNOTS) + 3),
    num_chunk_tokens=st.integers(0, 5),
    cost=st.floats(0.1, 5.0),
    cost_per_draft=costs,
)
def test_no_other_allocation_gives_more_tokens_per_second(
    rows: list[list[float]],
    limits: list[int],
    max_drafts: int,
    slopes: list[float],
    num_chunk_tokens: int,
    cost: float,
    cost_per_draft: float,
) -> None:
    survivals = np.cumprod(np.array(rows).reshape(-1, MAX_DEPTH), axis=1)
    limits = limits[: len(rows)]
    num_rows = len(rows) + num_chunk_tokens
    step = (np.array(slopes), num_rows, cost, cost_per_draft)
    found = allocated(survivals, limits, max_drafts, *step)
    assert all(0 <= depth <= limit for depth, limit in zip(found, limits, strict=True))
    assert sum(found) <= max_drafts
    defined = Step(survivals, *step)
    best = max(
        defined.rate(depths)
        for depths in itertools.product(*(range(limit + 1) for limit in limits))
        if sum(depths) <= max_drafts
    )
    assert defined.rate(found) == pytest.approx(best, rel=1e-9)


def test_the_example_of_the_module() -> None:
    survivals = np.array([[0.9, 0.8, 0.0, 0.0], [0.5, 0.1, 0.0, 0.0]])
    found = allocated(survivals, [2, 2], 100, np.zeros(len(KNOTS) + 3), 2, 6.0, 1.0)
    assert found == (2, 1)


@pytest.mark.parametrize(
    ("probe_factor", "cost_per_draft", "expected"),
    [
        pytest.param(0.5, 0.1, 1, id="half"),
        pytest.param(2.0, 0.1, 4, id="twice"),
        pytest.param(2.0, 9.0, 0, id="twice none"),
    ],
)
def test_a_probe_takes_another_number(
    probe_factor: float, cost_per_draft: float, expected: int
) -> None:
    survivals = np.array([[0.9, 0.8, 0.02, 0.01]])
    step = (np.zeros(len(KNOTS) + 3), 1, 1.0, cost_per_draft)
    assert sum(allocated(survivals, [4], 9, *step)) == (2 if cost_per_draft < 1 else 0)
    assert sum(allocated(survivals, [4], 9, *step, probe_factor)) == expected
    assert sum(allocated(survivals, [4], 3, *step, probe_factor)) == min(3, expected), "no room"
