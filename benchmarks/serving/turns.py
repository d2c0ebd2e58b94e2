"""Variants that are measured by turns, and the measures that come of them."""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.ratios import Interval

Say = Callable[[str], None]

# One round gives an interval without width, which looks exact.
_FEWEST_ROUNDS = 3


@dataclass(slots=True, kw_only=True)
class Variant:
    """Something to measure with a number of streams; each turn gives one figure, of `unit`."""

    name: str
    streams: int
    turn: Callable[[], Awaitable[float]]
    unit: str = "tokens/s"
    figures: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.figures)


async def by_turns(
    variants: Sequence[Variant],
    rounds: int,
    say: Say,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Runs every variant once per round, after one turn each to warm up.

    Each second round runs in the opposite order, so that a machine that gets slower all the time
    favours none.

    Args:
        is_enough: asked after each round from the third on; ends early.
    """
    for variant in variants:
        say(f"warms up {variant.name}, {variant.streams}")
        await variant.turn()
    for number in range(rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            variant.figures.append(await variant.turn())
            say(
                f"round {number + 1}: {variant.name}, {variant.streams}: "
                f"{variant.figures[-1]:.4g} {variant.unit}"
            )
        if number + 1 >= _FEWEST_ROUNDS and is_enough():
            break


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a measure should reach."""

    value: float
    is_most: bool = False

    def is_met_by(self, value: float) -> bool:
        return value <= self.value if self.is_most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.is_most else '≥'} {self.value:g}"


class CurvePoint(NamedTuple):
    """Where a measure stands among those that are drawn as one curve."""

    # One panel each.
    figure: str
    # One curve each.
    series: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One line of the table."""

    row: str
    what: str
    streams: int
    dtype: str
    # None: not measured; `note` says why.
    value: Interval | None
    # Empty: a ratio.
    unit: str = ""
    goal: Goal | None = None
    note: str = ""
    # None: drawn as a bar.
    point: CurvePoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What one row gave: its measures, and the figures of each round that they come from."""

    measures: Sequence[Measure]
    variants: Sequence[Variant]
