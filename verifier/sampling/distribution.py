"""From one row of adjusted logits to the tokens that may be sampled, and their probabilities.

Temperature, min-p, top-k, top-p, softmax, in this order. A row's result depends on this row alone.

Everything is in float64, by operations that IEEE 754 defines exactly, without contraction, in an
order that depends on the vocabulary's size and the parameters alone: every processor gives the same
bits. Whole vocabularies are never sorted: the cut is searched by buckets of the logits' values.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.sampling.bits import bits_of, from_bits

DoubleArray = npt.NDArray[np.float64]
PlaceArray = npt.NDArray[np.int32]

# Below it, an exponential is 0: as a share of a sum that contains exp(0), it is 0 in float32.
_SMALLEST = -708.0
_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 32 bits, so its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Added to a small number, it rounds it to an integer, which the lowest bits then hold.
_ROUNDER = 6755399441055744.0
_EXPONENT_BIAS, _EXPONENT_SHIFT = np.int64(1023), np.int64(52)

_NUM_LANES = 256
NUM_BUCKETS = 1024
# With at most so many candidates left, they are sorted, not put into buckets.
_FEW = 48
# The first buckets cover logits this far below the largest; e^-48 is next to nothing.
NEAR = 48.0


class DistributionParameters(NamedTuple):
    """The parameters of `Sampling` that make a distribution of adjusted logits."""

    temperature: float
    # -inf: no min-p. Probabilities are compared by their logarithms.
    log_min_p: float
    # 0: no top-k.
    top_k: int
    # 1: no top-p.
    top_p: float


class Scratch(NamedTuple):
    """Memory for one row of a vocabulary: 32 bytes a token, whatever the number of rows."""

    # Adjusted logits. [V]
    row: DoubleArray
    # The logits of the n tokens kept, less the largest, over the temperature. [V]
    scaled: DoubleArray
    # exp(scaled), then their probabilities. [V]
    weights: DoubleArray
    # Their ids, ascending. [V]
    token_ids: PlaceArray
    # Candidates for a cut. [V]
    places: PlaceArray
    sums: DoubleArray


@kernel
def new_scratch(vocab_size: int) -> Scratch:
    return Scratch(
        np.empty(vocab_size, dtype=np.float64),
        np.empty(vocab_size, dtype=np.float64),
        np.empty(vocab_size, dtype=np.float64),
        np.empty(vocab_size, dtype=np.int32),
        np.empty(vocab_size, dtype=np.int32),
        np.empty(NUM_BUCKETS, dtype=np.float64),
    )


@kernel
def exponentials(values: DoubleArray, results: DoubleArray, count: int) -> None:
    """results[:count] = exp(values[:count]), of values that are not positive.

    Within one unit in the last place: 2^k times a polynomial of the rest (Taylor's to degree 13,
    which is exact to 4e-18 within half of ln 2). A loop without a branch: it becomes vectors.
    """
    for i in range(count):
        value = values[i]
        x = value if value > _SMALLEST else _SMALLEST
        rounded = x * _LOG2_E + _ROUNDER
        k = rounded - _ROUNDER
        r = x - k * _LN2_HIGH - k * _LN2_LOW
        y = 1.0 / 6227020800.0
        y = y * r + 1.0 / 479001600.0
        y = y * r + 1.0 / 39916800.0
        y = y * r + 1.0 / 3628800.0
        y = y * r + 1.0 / 362880.0
        y = y * r + 1.0 / 40320.0
        y = y * r + 1.0 / 5040.0
        y = y * r + 1.0 / 720.0
        y = y * r + 1.0 / 120.0
        y = y * r + 1.0 / 24.0
        y = y * r + 1.0 / 6.0
        y = y * r + 0.5
        y = y * r * r + r + 1.0
        power = from_bits((bits_of(rounded) + _EXPONENT_BIAS) << _EXPONENT_SHIFT)
        results[i] = y * power if value > _SMALLEST else 0.0


@kernel
def total(values: DoubleArray, count: int) -> float:
    """The sum of values[:count], in lanes."""
    lanes = np.zeros(_NUM_LANES)
    num_whole = count // _NUM_LANES * _NUM_LANES
    for start in range(0, num_whole, _NUM_LANES):
        part = values[start : start + _NUM_LANES]
        for lane in range(_NUM_LANES):
            lanes[lane] += part[lane]
    result = 0.0
    for lane in range(_NUM_LANES):
        result += lanes[lane]
    for i in range(num_whole, count):
        result += values[i]
    return result


@kernel
def largest(values: DoubleArray, count: int) -> float:
    """The largest of values[:count]; -inf: there is none."""
    lanes = np.empty(_NUM_LANES)
    for lane in range(_NUM_LANES):
        lanes[lane] = -np.inf
    num_whole = count // _NUM_LANES * _NUM_LANES
    for start in range(0, num_whole, _NUM_LANES):
        part = values[start : start + _NUM_LANES]
        for lane in range(_NUM_LANES):
            lanes[lane] = part[lane] if part[lane] > lanes[lane] else lanes[lane]
    result = -np.inf
    for lane in range(_NUM_LANES):
        result = max(result, lanes[lane])
    for i in range(num_whole, count):
        result = max(result, values[i])
    return result


@kernel
def first_of(values: DoubleArray, count: int, value: float) -> int:
    """The first index of a value in values[:count]; 0: it is not there."""
    for i in range(count):
        if values[i] == value:
            return i
    return 0


@kernel
def keep_allowed(parameters: DistributionParameters, scratch: Scratch) -> tuple[int, float]:
    """Writes the tokens that may be sampled to the scratch's `token_ids`, `scaled`, `weights`.

    Args:
        parameters: with a positive temperature.
        scratch: the largest number of its `row` is finite.

    Returns:
        How many, and the sum of their weights. Of equal logits, lower ids are kept first.
    """
    row, scaled = scratch.row, scratch.scaled
    weights, token_ids = scratch.weights, scratch.token_ids
    temperature, log_min_p = parameters.temperature, parameters.log_min_p
    top_k, top_p = parameters.top_k, parameters.top_p
    vocab_size = count = len(row)
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    top = largest(row, count)
    for i in range(count):
        scaled[i] = (row[i] - top) / temperature
        token_ids[i] = i
    has_top_k = 0 < top_k < vocab_size
    if has_top_k or top_p < 1.0 or log_min_p > -np.inf:
        # Without the impossible ones, too: buckets hold finite values.
        count = 0
        for i in range(vocab_size):
            value = scaled[i]
            scaled[count] = value
            token_ids[count] = i
            count += value >= log_min_p and value > -np.inf
    if has_top_k and top_k < count:
        for i in range(count):
            weights[i] = 1.0
        count = keep_first(count, float(top_k), scratch)
    exponentials(scaled, weights, count)
    sum_of_weights = total(weights, count)
    if top_p < 1.0:
        count = keep_first(count, top_p * sum_of_weights, scratch)
        sum_of_weights = total(weights, count)
    return count, sum_of_weights


@kernel
def to_probabilities(weights: DoubleArray, count: int, sum_of_weights: float) -> None:
    """Divides weights[:count] by their sum, and rounds to float32."""
    for i in range(count):
        weights[i] = np.float64(np.float32(weights[i] / sum_of_weights))


@kernel
def keep_first(count: int, limit: float, scratch: Scratch) -> int:
    """Keeps the tokens, from the largest logit on and of equals from the lowest id on, while the
    weights before a token are less than `limit`; the first one always.

    Buckets of equal width by distance from the largest logit, and the weight of each, tell the
    bucket in which the limit is reached. Its tokens get buckets of their own, and so on until few
    or equal ones are left. The widest apart of them never share a bucket, so they become fewer.

    Args:
        count: how many tokens there are; all logits are finite, the largest is 0.

    Returns:
        How many are kept.
    """
    scaled, weights, token_ids = scratch.scaled, scratch.weights, scratch.token_ids
    places, sums = scratch.places, scratch.sums
    if count == 0:
        return 0
    for i in range(count):
        places[i] = i
    num_places = count
    before, least, most = 0.0, 0.0, NEAR
    while num_places > _FEW and least < most:
        for bucket in range(NUM_BUCKETS):
            sums[bucket] = 0.0
        width = most - least
        for i in range(num_places):
            place = places[i]
            sums[_bucket(scaled[place], least, width)] += weights[place]
        reached = 0
        while reached < NUM_BUCKETS and before + sums[reached] < limit:
            before += sums[reached]
            reached += 1
        if reached == NUM_BUCKETS:
            if num_places == count:
                return count
            # Added up in another order than in the round before, the weights just miss the limit.
            reached -= 1
            before -= sums[reached]
        num_left, nearest, farthest = 0, np.inf, 0.0
        for i in range(num_places):
            place = places[i]
            if _bucket(scaled[place], least, width) == reached:
                places[num_left] = place
                num_left += 1
                nearest = min(nearest, -scaled[place])
                farthest = max(farthest, -scaled[place])
        num_places, least, most = num_left, nearest, farthest
    if least < most:
        _sort_places(places, num_places, scaled)
    last = places[0]
    for i in range(num_places):
        if before >= limit and i > 0:
            break
        last = places[i]
        before += weights[last]
    cut = scaled[last]
    num_kept = 0
    for i in range(count):
        value, weight, token_id = scaled[i], weights[i], token_ids[i]
        scaled[num_kept], weights[num_kept], token_ids[num_kept] = value, weight, token_id
        num_kept += value > cut or (value == cut and i <= last)
    return num_kept


@kernel
def _bucket(scaled: float, least: float, width: float) -> int:
    """The bucket of a logit whose distance from the largest is `least` or more."""
    return int(min((-scaled - least) / width, 1.0) * (NUM_BUCKETS - 1))


@kernel
def _sort_places(places: PlaceArray, count: int, scaled: DoubleArray) -> None:
    """Sorts a few ascending places by their logits, descending; equals stay in order."""
    for i in range(1, count):
        place = places[i]
        j = i
        while j > 0 and scaled[places[j - 1]] < scaled[place]:
            places[j] = places[j - 1]
            j -= 1
        places[j] = place
