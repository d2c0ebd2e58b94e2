"""Statistics: whether a sample can come from a distribution."""

import math

import numpy as np
import numpy.typing as npt


def chi_square(counts: npt.ArrayLike, probs: npt.ArrayLike) -> float:
    """Pearson's statistic of `counts` [V] under `probs` [V]; infinite if a counted value has
    probability 0.
    """
    observed = np.asarray(counts, dtype=np.float64)
    expected = np.asarray(probs, dtype=np.float64) * observed.sum()
    if observed[expected == 0].any():
        return math.inf
    possible = expected > 0
    return float((((observed - expected) ** 2)[possible] / expected[possible]).sum())


def chi_square_limit(degrees_of_freedom: int, z: float = 4.0) -> float:
    """The value that the statistic exceeds with the probability that a normal variate exceeds `z`
    (4: three in 100,000), by Wilson and Hilferty's approximation.
    """
    spread = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def follows(counts: npt.ArrayLike, probs: npt.ArrayLike) -> bool:
    """Whether `counts` can come from `probs`, within `chi_square_limit`."""
    degrees_of_freedom = int((np.asarray(probs) > 0).sum()) - 1
    return chi_square(counts, probs) <= chi_square_limit(degrees_of_freedom)


def kolmogorov_smirnov(
    sample: npt.NDArray[np.float64], cumulative: npt.NDArray[np.float64]
) -> float:
    """sqrt(n) times the largest distance between the sample's distribution function and another.

    Args:
        sample: [n], ascending. cumulative: [n], the other distribution function there.

    It exceeds 1.95 once in a thousand samples of that distribution.
    """
    assert (np.diff(sample) >= 0).all()
    n = len(sample)
    above = (np.arange(1, n + 1) / n - cumulative).max()
    below = (cumulative - np.arange(n) / n).max()
    return float(math.sqrt(n) * max(above, below))
