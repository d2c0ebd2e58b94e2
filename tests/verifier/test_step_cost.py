"""The learned cost of a step, against known curves."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from verifier.drafts import step_cost
from verifier.drafts.step_cost import StepShape, cost_of, cost_of_rows, costs_of_rows, observe

CONTEXT = 400

# Seconds by rows. The last is that of Tandem's own decoder: tiles of 12 rows.
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 5e-3 + 1e-5 * rows,
    "linear": lambda rows: 1e-4 + 1e-3 * rows,
    "bound by memory, then by arithmetic": lambda rows: max(5e-3, 1e-4 * rows),
    "a staircase": lambda rows: 1e-3 * (1 + (rows - 1) // 12),
    "tiles": lambda rows: 6e-4 + 3e-5 * rows + 3e-4 * ((rows - 1) // 12),
}


class StepCost(step_cost.StepCost):
    """Learns from one step after another, and says what it expects."""

    def observe(self, shape: StepShape, duration_s: float) -> float:
        return observe(*self.state, *shape, duration_s)

    def seconds(self, shape: StepShape) -> float:
        """Before the first step in an unknown unit."""
        pace = float(self._scalars[0])
        return pace * cost_of(self.knots, self.coefficients, *shape)


def shape(rows: int, sequences: int = 1) -> StepShape:
    return StepShape(
        num_sequences=sequences,
        num_logits_rows=rows,
        num_attended=rows * CONTEXT,
        num_rows=rows,
    )


def learned(
    curve: Callable[[int], float],
    *,
    rows: tuple[int, ...] = (1, 1, 4, 8, 12, 13, 16, 24, 25, 32),
    num_steps: int = 400,
    noise: float = 0.08,
    disturbed: float = 0.05,
    speed: Callable[[int], float] = lambda step: 1.0,
) -> StepCost:
    """`disturbed`: the share of steps that take up to four times as long."""
    draw = random.Random(7)
    cost = StepCost(max_rows=512, row_tile=12)
    cost.observe(shape(200), curve(200))
    for step in range(num_steps):
        num_rows = draw.choice(rows)
        duration_s = curve(num_rows) * np.exp(draw.gauss(0, noise)) / speed(step)
        if draw.random() < disturbed:
            duration_s *= draw.uniform(1.5, 4)
        cost.observe(shape(num_rows), duration_s)
    return cost


@pytest.mark.parametrize("name", CURVES)
def test_finds_the_cost_of_rows_it_has_seen_under_noise(name: str) -> None:
    cost, curve = learned(CURVES[name]), CURVES[name]
    for rows in (1, 8, 12, 13, 16, 24, 25, 32):
        assert cost.seconds(shape(rows)) == pytest.approx(curve(rows), rel=0.1), rows


def test_goes_on_with_the_last_slope_where_no_step_was_seen() -> None:
    cost = learned(CURVES["linear"], rows=(1, 2, 4, 8), noise=0.0, disturbed=0.0)
    assert cost.seconds(shape(100)) == pytest.approx(CURVES["linear"](100), rel=0.15)


def test_tells_sequences_and_contexts_from_rows() -> None:
    draw = random.Random(3)
    cost = StepCost(max_rows=512, row_tile=12)

    def seconds(sequences: int, rows: int, attended: int) -> float:
        return 1e-3 + 1e-4 * sequences + 2e-5 * rows + 1e-8 * attended

    def observed(sequences: int, rows: int, context: int) -> StepShape:
        return StepShape(
            num_sequences=sequences,
            num_logits_rows=rows,
            num_attended=rows * context,
            num_rows=rows,
        )

    for _ in range(1500):
        sequences = draw.choice([1, 4, 16])
        rows = sequences * draw.choice([1, 2, 6])
        context = draw.choice([100, 1000, 4000])
        cost.observe(observed(sequences, rows, context), seconds(sequences, rows, rows * context))
    for sequences, rows, context in ((1, 2, 4000), (16, 16, 100), (16, 96, 4000), (4, 24, 1000)):
        found = cost.seconds(observed(sequences, rows, context))
        assert found == pytest.approx(seconds(sequences, rows, rows * context), rel=0.1)


@pytest.mark.parametrize("first_s", [0.0, float("inf")])
def test_a_first_step_of_no_duration_or_endless_spoils_no_later_one(first_s: float) -> None:
    cost = StepCost(max_rows=64, row_tile=8)
    shape = StepShape(num_sequences=1, num_logits_rows=1, num_attended=10, num_rows=1)
    cost.observe(shape, first_s)
    for _ in range(400):
        cost.observe(shape, 0.01)
    assert cost.seconds(shape) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_more_rows_never_cost_less_whatever_was_measured(seed: int) -> None:
    draw = random.Random(seed)
    cost = StepCost(max_rows=512, row_tile=8)
    for _ in range(500):
        cost.observe(shape(draw.randint(1, 600)), 10 ** draw.uniform(-12, 4))
    costs = [cost.seconds(shape(rows)) for rows in range(1, 700)]
    assert all(np.isfinite(costs))
    assert costs == sorted(costs)
    assert costs[0] > 0


@pytest.mark.parametrize(("max_rows", "row_tile"), [(1, 1), (64, 1), (100, 12), (8192, 128)])
def test_the_curve_is_straight_between_knots_and_covers_every_step(
    max_rows: int, row_tile: int
) -> None:
    cost = StepCost(max_rows=max_rows, row_tile=row_tile)
    assert cost.knots[0] == 1
    assert (np.diff(cost.knots) > 0).all()
    assert cost.knots[-1] >= max_rows
    assert len(cost.knots) < 40
    knots, coefficients = cost.knots, cost.coefficients
    coefficients[4:] = range(1, len(knots))
    for first_row in (1.0, float(knots[-1] // 2), float(knots[-1])):
        found = np.empty(100)
        costs_of_rows(knots, coefficients, first_row, found)
        assert found == pytest.approx(
            [cost_of_rows(knots, coefficients, first_row + i) for i in range(100)]
        )
    for knot, expected in zip(knots, np.cumsum([0, *coefficients[4:]]), strict=True):
        assert cost_of_rows(knots, coefficients, float(knot)) == pytest.approx(expected)


@pytest.mark.parametrize("unit", [1e-4, 1e4])
def test_the_scale_of_the_coefficients_is_held_and_changes_no_cost(unit: float) -> None:
    """Noise lets it drift by as much in hours: steps determine only its product with the pace."""
    cost, drifted = learned(CURVES["tiles"]), learned(CURVES["tiles"])
    drifted.coefficients *= unit
    drifted._products /= unit**2
    drifted._targets /= unit
    drifted._scalars[0] /= unit
    for step in range(100):
        num_rows = (1, 4, 12, 13, 25)[step % 5]
        duration_s = CURVES["tiles"](num_rows)
        expected_s = drifted.observe(shape(num_rows), duration_s)
        assert expected_s == pytest.approx(cost.observe(shape(num_rows), duration_s), rel=0.02)
        assert 0.1 <= drifted.coefficients.sum() <= 1e3
    for rows in (1, 8, 12, 13, 16, 24, 25, 32):
        assert drifted.seconds(shape(rows)) == pytest.approx(cost.seconds(shape(rows)), rel=0.02)
