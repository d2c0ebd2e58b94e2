"""The probability that a draft is right, learned from every hint.

A trial is the next token of a hint that was right so far. Its class is the hint's source, its match
length m, and the token's place h in the hint; not its place among the drafts of a step. So a hint
teaches the same whether its tokens are verified 31 at a time, or none is and the sequence's own
tokens are compared with it one by one: what is known stays fresh where no draft is verified.

A class starts with a probability of (m + h) / (m + h + 2), for m + h tokens that agreed. That is
near the figures of source code, prose and licences.
Counts fade. Sequences differ more than classes do, so each has a correction of its own in log odds:
it shows within a few tokens that a text repeats itself faithfully, or that a drafter lies.

Pure arithmetic; bounded, whatever lengths are claimed.
"""

import math

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

FloatArray = npt.NDArray[np.float64]

NUM_SOURCES = 3
# Upper bounds of the classes of match lengths, 0 if unknown, and of places in a hint.
_MATCH_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_PLACE_BOUNDS = (0, 1, 2, 3, 5, 8, 12, 20, 31)

# A class's prior counts as this many trials.
_PRIOR_TRIALS = 8.0
# When a class has more trials, all of them count half.
_MOST_TRIALS = 512.0
# The variance of sequences' corrections, and by how much one may drift with a trial.
CORRECTION_VARIANCE = 1.0
_DRIFT = 0.001
_MOST_LOG_ODDS = 6.0


class Acceptance:
    """Owned by the engine thread.

    Attributes:
        trials: [sources, match classes, place classes, 2] float64: decayed numbers of trials, and
            of tokens that were right; the prior included.
    """

    def __init__(self) -> None:
        self.trials = np.empty((NUM_SOURCES, len(_MATCH_BOUNDS) + 1, len(_PLACE_BOUNDS) + 1, 2))
        self.trials[..., 0] = _PRIOR_TRIALS
        for m, first_m in enumerate((0, *(bound + 1 for bound in _MATCH_BOUNDS))):
            for h, first_h in enumerate((0, *(bound + 1 for bound in _PLACE_BOUNDS))):
                # Unknown lengths count as 1.
                agreed = max(1, first_m) + first_h
                self.trials[:, m, h, 1] = _PRIOR_TRIALS * agreed / (agreed + 2)


@kernel
def _match_class(match_length: int) -> int:
    for i in range(len(_MATCH_BOUNDS)):
        if match_length <= _MATCH_BOUNDS[i]:
            return i
    return len(_MATCH_BOUNDS)


@kernel
def _place_class(place: int, first: int) -> int:
    """`first`: a class that is not after the place's."""
    for i in range(first, len(_PLACE_BOUNDS)):
        if place <= _PLACE_BOUNDS[i]:
            return i
    return len(_PLACE_BOUNDS)


@kernel
def _probability(counts: FloatArray, factor: float) -> float:
    """`counts`: of a class, [2]. `factor`: on the odds."""
    odds: float = counts[1] / (counts[0] - counts[1]) * factor
    return odds / (1.0 + odds)


@kernel
def survival(
    trials: FloatArray,
    source: int,
    match_length: int,
    place: int,
    log_odds: float,
    out: FloatArray,
) -> None:
    """Sets `out` to the probability, for each token of a hint from `place` on, that it and all
    before it are right.
    """
    of_match = trials[source, _match_class(match_length)]
    factor = math.exp(log_odds)
    together, each, h = 1.0, 0.0, -1
    for j in range(len(out)):
        place_class = _place_class(place + j, max(h, 0))
        if place_class != h:
            h = place_class
            each = _probability(of_match[h], factor)
        together *= each
        out[j] = together


@kernel
def learn(
    trials: FloatArray,
    source: int,
    match_length: int,
    place: int,
    num_stood: int,
    is_failed: bool,
    log_odds: float,
    variance: float,
) -> tuple[float, float]:
    """Learns that `num_stood` tokens of a hint from `place` on were right, and, if `is_failed`, the
    next was wrong. Returns the sequence's correction and its variance.
    """
    of_match = trials[source, _match_class(match_length)]
    h = 0
    for j in range(num_stood + is_failed):
        outcome = 1.0 if j < num_stood else 0.0
        h = _place_class(place + j, h)
        counts = of_match[h]
        expected = _probability(counts, math.exp(log_odds))
        if counts[0] >= _MOST_TRIALS:
            counts *= 0.5
        # The prior never fades to nothing: neither certainty is reached.
        counts[0] += 1.0
        counts[1] += min(max(outcome, 0.001), 0.999)
        # A Kalman filter's step: what is uncertain moves far, and becomes more certain.
        variance /= 1.0 + variance * expected * (1.0 - expected)
        log_odds += variance * (outcome - expected)
        variance = min(variance + _DRIFT, CORRECTION_VARIANCE)
        log_odds = min(max(log_odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
    return log_odds, variance
