"""Comparison on a machine whose speed changes from minute to minute."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median, or a statistic of medians, and its 95 % interval by the percentile bootstrap."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The rounds' ratios; the two parts of a round ran next to each other."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(ratios(above, below))


def median_interval(values: Sequence[float]) -> Interval:
    """The median of the values and how sure it is.

    Few values give a wide interval: five of them about their whole range.
    """
    return interval(lambda rounds: statistics.median(values[i] for i in rounds), len(values))


def interval(statistic: Callable[[Sequence[int]], float], num_rounds: int) -> Interval:
    """A statistic of all rounds and how sure it is; deterministic.

    Args:
        statistic: takes the numbers of some rounds, in [0, num_rounds), which may repeat.
    """
    draw = random.Random(2026)
    rounds = range(num_rounds)
    resampled = sorted(statistic(draw.choices(rounds, k=num_rounds)) for _ in range(_NUM_RESAMPLES))
    return Interval(
        median=statistic(rounds),
        low=resampled[round(0.025 * _NUM_RESAMPLES)],
        high=resampled[round(0.975 * _NUM_RESAMPLES) - 1],
    )
