"""Comparison on a machine whose speed changes from minute to minute."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median and its 95 % interval by the percentile bootstrap."""

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
    """The median of the values and how sure it is; deterministic.

    Few values give a wide interval: five of them about their whole range.
    """
    draw = random.Random(2026)
    resampled = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES)
    )
    return Interval(
        median=statistics.median(values),
        low=resampled[round(0.025 * _NUM_RESAMPLES)],
        high=resampled[round(0.975 * _NUM_RESAMPLES) - 1],
    )
