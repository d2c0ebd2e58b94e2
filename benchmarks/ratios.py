"""Comparison on a machine whose speed changes from minute to minute."""

import statistics
from collections.abc import Sequence


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios; the two parts of a round ran next to each other."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
