"""The learned cost of a step, against known curves."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from verifier.drafts.step_cost import cost_of, costs_from, new_curve, new_pace, observe

# Seconds by rows. The last is that of Tandem's own decoder: tiles of 12 rows.
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 5e-3 + 1e-5 * rows,
    "linear": lambda rows: 1e-4 + 1e-3 * rows,
    "bound by memory, then by arithmetic": lambda rows: max(5e-3, 1e-4 * rows),
    "tiles": lambda rows: 6e-4 + 3e-5 * rows + 3e-4 * ((rows - 1) // 12),
}


class StepCost:
    """Learns from one step after another, and says what it expects."""

    def __init__(self, max_rows: int = 512) -> None:
        self.curve, self.pace = new_curve(max_rows), new_pace()

    def observe(self, rows: int, duration_s: float, *, is_decoding: bool = True) -> float:
        return observe(self.curve, self.pace, rows, duration_s, is_decoding)

    def seconds(self, rows: int) -> float:
        return float(self.pace[0] * cost_of(self.curve, rows))

    def deciding_s(self, rows: int) -> float:
        out = np.empty(1)
        costs_from(self.curve, self.pace, rows, out)
        return float(self.pace[0] * out[0])


def learned(
    curve: Callable[[int], float],
    *,
    rows: tuple[int, ...] = (1, 1, 4, 8, 12, 15, 18, 27, 33),
    num_steps: int = 1000,
    noise: float = 0.05,
    disturbed: float = 0.05,
    speed: Callable[[int], float] = lambda step: 1.0,
) -> StepCost:
    """`disturbed`: the share of steps that take up to four times as long."""
    draw = random.Random(7)
    cost = StepCost()
    for step in range(num_steps):
        num_rows = draw.choice(rows)
        duration_s = curve(num_rows) * np.exp(draw.gauss(0, noise)) / speed(step)
        if draw.random() < disturbed:
            duration_s *= draw.uniform(1.5, 4)
        cost.observe(num_rows, duration_s)
    return cost


@pytest.mark.parametrize("name", CURVES)
def test_finds_the_cost_of_rows_it_has_seen_under_noise(name: str) -> None:
    cost, curve = learned(CURVES[name]), CURVES[name]
    scale = cost.seconds(1) / curve(1)
    # Disturbed steps are in the pace; only ratios decide.
    assert scale == pytest.approx(1.0, abs=0.15)
    for rows in (4, 8, 12, 15, 18, 27, 33):
        assert cost.seconds(rows) == pytest.approx(scale * curve(rows), rel=0.12), rows


def test_a_first_step_that_was_held_up_is_corrected_by_the_next() -> None:
    cost = StepCost()
    for rows, duration_s in ((1, 0.03), (1, 0.01), (2, 0.04), (2, 0.011)):
        cost.observe(rows, duration_s)
    assert cost.seconds(2) / cost.seconds(1) == pytest.approx(1.1, rel=0.05)


def test_rows_that_no_step_had_cost_half_of_those_before_and_never_more_than_more_rows() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe(8, 0.008)
    assert cost.seconds(10) == pytest.approx(0.009, rel=0.01)
    assert cost.seconds(15) == pytest.approx(0.0115, rel=0.01)
    for _ in range(50):
        cost.observe(15, 0.0085)
    assert cost.seconds(10) <= cost.seconds(12) <= cost.seconds(15) * 1.001


def test_a_slower_machine_changes_the_pace_and_not_what_is_known_of_other_rows() -> None:
    cost = learned(CURVES["linear"], disturbed=0.0, speed=lambda step: 1.0 if step < 800 else 0.5)
    for _ in range(100):
        for rows in (1, 4, 8):
            cost.observe(rows, 2 * CURVES["linear"](rows))
    assert cost.seconds(8) / cost.seconds(4) == pytest.approx(2, rel=0.1)
    assert cost.seconds(33) / cost.seconds(8) == pytest.approx(4, rel=0.2)
    before = cost.pace[0]
    cost.observe(300, 9.0, is_decoding=False)
    assert cost.pace[0] == before, "a prompt's rows are no measure of the pace"


def test_what_no_step_had_for_long_is_taken_for_cheaper_until_one_has() -> None:
    cost = learned(CURVES["linear"], disturbed=0.0)
    known_s = cost.seconds(33)
    for _ in range(8192):
        cost.observe(1, CURVES["linear"](1))
    assert cost.seconds(33) == pytest.approx(known_s, rel=0.2)
    assert cost.deciding_s(33) == pytest.approx(cost.seconds(33) / 2, rel=0.05)
    cost.observe(33, CURVES["linear"](33))
    assert cost.deciding_s(33) == pytest.approx(cost.seconds(33), rel=0.01)


@pytest.mark.parametrize("first_s", [0.0, float("inf")])
def test_a_first_step_of_no_duration_or_endless_spoils_no_later_one(first_s: float) -> None:
    cost = StepCost()
    cost.observe(1, first_s)
    for _ in range(400):
        cost.observe(1, 0.01)
    assert cost.seconds(1) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_finite_and_positive_whatever_was_measured(seed: int) -> None:
    draw = random.Random(seed)
    cost = StepCost()
    for _ in range(2000):
        cost.observe(draw.randint(1, 600), 10 ** draw.uniform(-12, 12))
    costs = [cost.seconds(rows) for rows in range(1, 700)]
    assert all(np.isfinite(costs))
    assert min(costs) > 0


@pytest.mark.parametrize("max_rows", [1, 2, 64, 8192])
def test_the_curve_covers_every_step_and_is_straight_between_its_rows(max_rows: int) -> None:
    curve, pace = new_curve(max_rows), new_pace()
    rows = curve[:, 0]
    assert rows[0] == 1
    assert rows[-1] >= max_rows
    assert (np.diff(rows) >= 1).all()
    assert len(rows) < 50
    curve[:, 1] = np.random.default_rng(1).uniform(1, 2, len(rows))
    found = np.empty(int(rows[-1]))
    costs_from(curve, pace, 1, found)
    every = np.arange(1, int(rows[-1]) + 1)
    assert found == pytest.approx(np.interp(every, rows, curve[:, 1]))
    assert [cost_of(curve, float(r)) for r in every] == pytest.approx(found)
