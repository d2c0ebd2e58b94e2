"""The exponential race that samples a token: argmax of probability / noise."""

import math

import numpy as np

from servicekit.kernels.jit import kernel
from verifier.sampling import philox
from verifier.sampling.distribution import DoubleArray, PlaceArray, first_of, largest

_NUM_LANES = 256
_ALMOST_1 = 1.0 - 2.0**-40
_LEAST_GAP = 2.0**-53


@kernel
def win_race(
    probs: DoubleArray, token_ids: PlaceArray, count: int, seed: np.uint64, position: int
) -> int:
    """The token of one row with the largest score, probability / noise; the lowest id wins a tie.
    It is distributed as the probabilities.

    Most tokens need no logarithm, many no noise. Let g = 1 - u be a token's gap, of its uniform u;
    u has 53 bits, so g is exact, and 2^-53 or more. Its noise is -ln(u) >= g, so its score is
    probability / g at most. The logarithm and the division each err by 2^-52 at most, and so do
    the two products below. So where probability < best * g * (1 - 2^-40), the score as computed
    is less than the best one, and the token can neither win nor tie.

    Args:
        probs: of the tokens `token_ids`, ascending; the first `count` are valid, one is positive.
    """
    # The likeliest one sets a bar that few others pass.
    likeliest = first_of(probs, count, largest(probs, count))
    winner = int(token_ids[likeliest])
    best = probs[likeliest] / -math.log(philox.uniform(winner, position, seed))
    lanes, words = np.empty(_NUM_LANES), np.empty((4, _NUM_LANES), dtype=np.uint64)
    for start in range(0, count, _NUM_LANES):
        end = min(start + _NUM_LANES, count)
        part, ids = probs[start:end], token_ids[start:end]
        bar = best * _ALMOST_1
        num_possible = 0
        for i in range(len(part)):
            num_possible += part[i] >= bar * _LEAST_GAP
        if num_possible == 0:
            continue
        uniforms = lanes[: len(part)]
        philox.fill_uniforms(ids, position, seed, words, uniforms)
        num_possible = 0
        for i in range(len(part)):
            num_possible += part[i] >= bar * (1.0 - uniforms[i])
        if num_possible == 0:
            continue
        for i in range(len(part)):
            if part[i] >= bar * (1.0 - uniforms[i]) and part[i] > 0.0:
                score = part[i] / -math.log(uniforms[i])
                if score > best or (score == best and ids[i] < winner):
                    best, winner = score, int(ids[i])
    return winner
