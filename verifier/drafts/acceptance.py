"""The probability that a draft is right, learned from every hint.

A trial is the next token of a hint that was right so far. Its class is the hint's source and how
many tokens agreed before it: the hint's match, and its own tokens that came. So a hint teaches the
same whether its tokens are verified 31 at a time, or none is and the sequence's own tokens are
compared with it one by one: what is known stays fresh where no draft is verified.

A class starts with a probability of n / (n + 2), for n tokens that agreed, and its counts fade.
Sequences differ more than classes do, so each has a correction of its own in log odds: it shows
within a few tokens that a text repeats itself faithfully, or that a drafter lies.

Pure arithmetic; bounded, whatever lengths are claimed.
"""

import math

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

FloatArray = npt.NDArray[np.float64]

NUM_SOURCES = 3
# 0 tokens that agreed, 1, 2 or 3, 4 to 7, and so on.
_NUM_CLASSES = 8
# A class's prior counts as this many trials; when it has the most, all of them count half.
_PRIOR_TRIALS, _MOST_TRIALS = 8.0, 512.0
# How far a sequence's correction follows a trial.
_RATE, _MOST_LOG_ODDS = 0.2, 6.0


def new_trials() -> FloatArray:
    """[sources, classes, 2]: fading numbers of trials, and of tokens that were right."""
    trials = np.full((NUM_SOURCES, _NUM_CLASSES, 2), _PRIOR_TRIALS)
    agreed = np.maximum(1, 1 << np.arange(_NUM_CLASSES) >> 1)
    trials[..., 1] *= agreed / (agreed + 2)
    return trials


@kernel
def _class(num_agreed: int) -> int:
    i = 0
    while i < _NUM_CLASSES - 1 and num_agreed >= 1 << i:
        i += 1
    return i


@kernel
def _probability(counts: FloatArray, log_odds: float) -> float:
    """`counts`: of a class, [2]. `log_odds`: the sequence's correction."""
    odds: float = counts[1] / (counts[0] - counts[1]) * math.exp(log_odds)
    return odds / (1.0 + odds)


@kernel
def survival(
    trials: FloatArray, source: int, num_agreed: int, log_odds: float, out: FloatArray
) -> None:
    """Sets `out` to the probability, for each token of a hint, that it and all before it are right.

    Args:
        num_agreed: tokens that agreed before the first.
        log_odds: the sequence's correction.
    """
    together = 1.0
    for j in range(len(out)):
        together *= _probability(trials[source, _class(num_agreed + j)], log_odds)
        out[j] = together


@kernel
def learn(
    trials: FloatArray,
    source: int,
    num_agreed: int,
    num_stood: int,
    is_failed: bool,
    log_odds: float,
) -> float:
    """Learns that `num_stood` tokens of a hint were right, and, if `is_failed`, the next was wrong.
    Returns the sequence's correction.
    """
    for j in range(num_stood + is_failed):
        outcome = 1.0 if j < num_stood else 0.0
        counts = trials[source, _class(num_agreed + j)]
        log_odds += _RATE * (outcome - _probability(counts, log_odds))
        log_odds = min(max(log_odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
        if counts[0] >= _MOST_TRIALS:
            counts *= 0.5
        # The prior never fades to nothing: neither certainty is reached.
        counts[0] += 1.0
        counts[1] += min(max(outcome, 0.001), 0.999)
    return log_odds
