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


@settings(max_examples=examples(400))
@given(
    rows=st.lists(st.lists(probabilities, min_size=MAX_DEPTH, max_size=MAX_DEPTH), max_size=3),
    slopes=st.lists(costs, min_size=len(KNOTS) + 3, max_size=len(KNOTS) + 3),
    cost=st.floats(0.1, 5.0),
    num_chunk_rows=st.integers(0, 20),
    chunk_cost=costs,
)
def test_beside_chunks_no_other_allocation_saves_more_time(
    rows: list[list[float]],
    slopes: list[float],
    cost: float,
    num_chunk_rows: int,
    chunk_cost: float,
) -> None:
    """Time saved: what the expected tokens take in the best step without chunks, less the time of
    this step.
    """
    survivals = np.cumprod(np.array(rows).reshape(-1, MAX_DEPTH), axis=1)
    coefficients, count = np.array(slopes), len(rows)
    all_depths = list(itertools.product(range(MAX_DEPTH + 1), repeat=count))
    alone = Step(survivals, coefficients, count, cost)
    beside = Step(survivals, coefficients, count + num_chunk_rows, cost + chunk_cost)
    best_rate = max(map(alone.rate, all_depths))

    def saved(depths: tuple[int, ...]) -> float:
        return beside.expected(depths) - best_rate * beside.cost(depths)

    found = allocated(
        survivals,
        [MAX_DEPTH] * count,
        100,
        coefficients,
        count,
        cost,
        0.0,
        num_chunk_rows=num_chunk_rows,
        chunk_cost=chunk_cost,
    )
    assert saved(found) == pytest.approx(max(map(saved, all_depths)), rel=1e-9, abs=1e-9)


def test_a_long_chunk_makes_no_unlikely_draft_worth_its_row() -> None:
    coefficients = np.zeros(len(KNOTS) + 3)
    coefficients[4:] = np.diff(KNOTS)  # each row costs 1
    survivals = np.array([[0.2, 0.1, 0.05, 0.01]])
    step = ([4], 100, coefficients, 1, 1.0, 0.0)
    assert allocated(survivals, *step) == (0,)
    assert allocated(survivals, *step, num_chunk_rows=500) == (0,)


def test_the_example_of_the_module() -> None:
    survivals = np.array([[0.9, 0.8, 0.0, 0.0], [0.5, 0.1, 0.0, 0.0]])
    found = allocated(survivals, [2, 2], 100, np.zeros(len(KNOTS) + 3), 2, 6.0, 1.0)
    assert found == (2, 1)


def test_rows_of_a_begun_tile_that_cost_nothing_are_used() -> None:
    """The first draft alone does not pay for a new tile; three that share it do, but no fourth."""
    coefficients = np.zeros(len(KNOTS) + 3)
    coefficients[4 + 1] = 1.0  # from row 3 to row 4
    coefficients[4 + 3] = 1.0  # from row 6 to row 7
    survivals = np.array([[0.45, 0.4, 0.35, 0.3]])
    assert allocated(survivals, [1], 100, coefficients, 3, 1.2, 0.0) == (0,)
    assert allocated(survivals, [4], 100, coefficients, 3, 1.2, 0.0) == (3,)


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


def test_some_of_the_likeliest_can_be_taken_instead_of_none() -> None:
    survivals = np.array([[0.9, 0.8, 0.02, 0.01], [0.7, 0.1, 0.0, 0.0]])
    dear, cheap = ((np.zeros(len(KNOTS) + 3), 2, 1.0, per_draft) for per_draft in (9.0, 0.1))
    assert allocated(survivals, [4, 4], 9, *dear) == (0, 0)
    assert allocated(survivals, [4, 4], 9, *dear, num_instead_of_none=2) == (2, 0)
    assert allocated(survivals, [4, 4], 1, *dear, num_instead_of_none=2) == (1, 0)
    assert allocated(survivals, [1, 4], 9, *dear, num_instead_of_none=2) == (1, 1)
    assert allocated(survivals, [4, 4], 9, *cheap, num_instead_of_none=1) == (2, 1)


def test_no_probe_is_known_to_be_bad() -> None:
    coefficients = np.zeros(len(KNOTS) + 3)
    coefficients[4 + 1] = 9.0  # from row 3 to row 4
    survivals = np.array([[0.9, 0.8, 0.7, 0.6]])
    assert allocated(survivals, [4], 9, coefficients, 1, 1.0, 0.0, 2.0) == (2,)


def test_no_sequence_needs_no_draft() -> None:
    none = np.zeros((0, MAX_DEPTH))
    assert allocated(none, [], 100, np.zeros(len(KNOTS) + 3), 0, 1.0, 1.0) == ()
