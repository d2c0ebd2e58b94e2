"""What a step costs: seconds by its shape, learned from every step.

    cost = pace * (c0 + c1 * sequences + c2 * logits rows + c3 * attended tokens + curve(rows))

Every coefficient is 0 or more. `curve` grows piecewise linearly with the rows of the forward pass.
Kernels compute rows in tiles, so a row that begins a tile may cost much more than the next: at the
first multiples of `row_tile` the curve may jump. Where no step was seen, its slope continues.

Each step shifts the coefficients by least squares of the relative errors (weights 1 / cost²), whose
older steps fade, so an idle part of the curve is forgotten in some thousand steps and tried again.
A step far off the others counts less (Huber's weight), since another process may have held the
processor. `pace` follows a machine that becomes slower or faster as a whole, so that steps of
before and after can be compared. Only ratios of costs decide anything.

Pure arithmetic, the same for the same steps in the same order; knows no clock, sequence or model.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

FloatArray = npt.NDArray[np.float64]

# How much of a step's weight is left after the next one.
_FADING = 0.997
# How far the pace follows one step, once some were seen.
_PACE_RATE = 0.1
# A step counts less if its error is more than so many mean errors.
_HUBER = 2.0
# A row's cost before any step was seen, as a share of a step's fixed cost. Optimistic, so that
# drafts are tried.
_PRIOR_ROW = 0.02
# How strongly a slope follows the one before it, in steps.
_SMOOTHNESS = 0.3
# Added to each coefficient's weight, as a share of it: keeps the equations solvable where no step
# tells two coefficients apart.
_RIDGE = 1e-3
_SWEEPS = 4
# The sum of the coefficients is held within these. Steps determine only its product with the pace,
# so it would drift without end, until constants that are meant to be tiny beside it are not.
_LEAST_SUM, _MOST_SUM = 0.1, 1e3
# A longer step counts as this long.
_LONGEST_S = 1e4

# Coefficients before the curve's: fixed, sequences, logits rows, attended tokens / 1024.
_NUM_LINEAR = 4
_ATTENDED_UNIT = 1024.0
_NUM_JUMPS = 4

# What `_scalars` holds.
_PACE, _ERROR, _COUNT = range(3)


class StepShape(NamedTuple):
    """What a step's cost depends on. Some are made in every step: a frozen dataclass takes three
    times as long.
    """

    num_sequences: int
    num_logits_rows: int
    # Summed over the rows: the tokens that each attends to.
    num_attended: int
    # Tokens scheduled: decodes, drafts and prefill chunks.
    num_rows: int


NO_STEP = StepShape(num_sequences=0, num_logits_rows=0, num_attended=0, num_rows=0)


class StepCost:
    """Owned by the engine thread.

    Attributes:
        knots: [N + 1] int64: the rows between which the curve is a straight line, from 1 on.
        coefficients: [4 + N] float64: see the module; the curve's are the rises between knots.
    """

    def __init__(self, *, max_rows: int, row_tile: int) -> None:
        """Args:
        max_rows: the most of a step.
        row_tile: how many rows the model's kernels compute at once.
        """
        self.knots = _knots(max_rows, row_tile)
        size = _NUM_LINEAR + len(self.knots) - 1
        self.coefficients = np.zeros(size)
        self.coefficients[0] = 1.0
        self.coefficients[_NUM_LINEAR:] = _PRIOR_ROW * np.diff(self.knots)
        # Fading sums over the steps: of weight * features * features, of weight * features * cost.
        self._products = np.zeros((size, size))
        self._targets = np.zeros(size)
        self._scalars = np.array([1.0, 1.0, 0.0])

    @property
    def state(self) -> "CostState":
        """For kernels."""
        return self.knots, self.coefficients, self._products, self._targets, self._scalars


# Knots, coefficients, and what `observe` keeps beside them.
CostState = tuple[npt.NDArray[np.int64], FloatArray, FloatArray, FloatArray, FloatArray]


def _knots(max_rows: int, row_tile: int) -> npt.NDArray[np.int64]:
    """1 and the ends of tiles, with the next row as a knot of its own after the first ones.

    Example, for tiles of 12 rows and 100 at most: 1 4 12 13 24 25 36 37 48 49 72 96 144.
    """
    knots = [1]
    if row_tile >= 8:
        knots.append(row_tile // 3)
    for tile in range(1, _NUM_JUMPS + 1):
        knots += [tile * row_tile, tile * row_tile + 1]
    knots = sorted({knot for knot in knots if knot >= 1})
    step = row_tile * _NUM_JUMPS // 2
    end = row_tile * _NUM_JUMPS
    while knots[-1] < max_rows:
        # 6, 8, 12, 16, 24, ... tiles.
        end += step
        knots.append(end)
        end += step
        knots.append(end)
        step *= 2
    return np.array(knots, dtype=np.int64)


@kernel
def cost_of_rows(knots: npt.NDArray[np.int64], coefficients: FloatArray, num_rows: float) -> float:
    """The curve; beyond its last knot, the last slope continues."""
    cost = 0.0
    for i in range(len(knots) - 1):
        first, last = knots[i], knots[i + 1]
        if num_rows <= first:
            break
        share = (num_rows - first) / (last - first)
        if share > 1.0 and i < len(knots) - 2:
            share = 1.0
        cost += coefficients[_NUM_LINEAR + i] * share
    return cost


@kernel
def costs_of_rows(
    knots: npt.NDArray[np.int64], coefficients: FloatArray, first_row: float, out: FloatArray
) -> None:
    """`cost_of_rows` for as many numbers of rows as `out` has, from `first_row` on."""
    cost = cost_of_rows(knots, coefficients, first_row)
    segment, last_segment = 0, len(knots) - 2
    for i in range(len(out)):
        out[i] = cost
        while segment < last_segment and first_row + i >= knots[segment + 1]:
            segment += 1
        width = knots[segment + 1] - knots[segment]
        cost += coefficients[_NUM_LINEAR + segment] / width


@kernel
def fixed_cost(
    coefficients: FloatArray, num_sequences: float, num_logits_rows: float, num_attended: float
) -> float:
    """A step's cost without the curve."""
    cost: float = coefficients[0]
    cost += coefficients[1] * num_sequences
    cost += coefficients[2] * num_logits_rows
    cost += coefficients[3] * num_attended / _ATTENDED_UNIT
    return cost


@kernel
def cost_of(
    knots: npt.NDArray[np.int64],
    coefficients: FloatArray,
    num_sequences: float,
    num_logits_rows: float,
    num_attended: float,
    num_rows: float,
) -> float:
    """A step's cost, without the pace."""
    return fixed_cost(coefficients, num_sequences, num_logits_rows, num_attended) + cost_of_rows(
        knots, coefficients, num_rows
    )


@kernel
def observe(
    knots: npt.NDArray[np.int64],
    coefficients: FloatArray,
    products: FloatArray,
    targets: FloatArray,
    scalars: FloatArray,
    num_sequences: float,
    num_logits_rows: float,
    num_attended: float,
    num_rows: float,
    duration_s: float,
) -> float:
    """Learns from a step; returns what was expected of it, in seconds, just before.

    Args:
        knots, coefficients, products, targets, scalars: `StepCost.state`, which is changed.
    """
    duration_s = min(max(duration_s, 1e-9), _LONGEST_S)
    size = len(coefficients)
    features = np.zeros(size)
    features[0] = 1.0
    features[1] = num_sequences
    features[2] = num_logits_rows
    features[3] = num_attended / _ATTENDED_UNIT
    for i in range(len(knots) - 1):
        if num_rows <= knots[i]:
            break
        share = (num_rows - knots[i]) / (knots[i + 1] - knots[i])
        if share > 1.0 and i < len(knots) - 2:
            share = 1.0
        features[_NUM_LINEAR + i] = share
    cost = 0.0
    for i in range(size):
        cost += features[i] * coefficients[i]
    if scalars[_COUNT] == 0.0:
        scalars[_PACE] = duration_s / cost
    expected_s: float = scalars[_PACE] * cost
    scalars[_COUNT] += 1.0
    ratio = duration_s / expected_s
    error = abs(ratio - 1.0)
    weight = 1.0
    if error > _HUBER * scalars[_ERROR]:
        weight = _HUBER * scalars[_ERROR] / error
    rate = max(0.02, 1.0 / (1.0 + scalars[_COUNT]))
    scalars[_ERROR] += rate * (min(error, 1.0) - scalars[_ERROR])
    # Relative errors count.
    weight /= cost * cost
    for i in range(size):
        targets[i] = _FADING * targets[i] + weight * features[i] * ratio * cost
        for j in range(size):
            products[i, j] = _FADING * products[i, j] + weight * features[i] * features[j]
    change = min(max(np.log(ratio), -0.5), 0.5)
    scalars[_PACE] *= np.exp(max(_PACE_RATE, 0.5 / (1.0 + scalars[_COUNT])) * change)
    _solve(knots, coefficients, products, targets)
    unit = coefficients.sum()
    if not _LEAST_SUM <= unit <= _MOST_SUM:
        # Costs are counted in this unit from now on; no ratio of costs changes.
        coefficients /= unit
        products *= unit * unit
        targets *= unit
        scalars[_PACE] *= unit
    return expected_s


@kernel
def _solve(
    knots: npt.NDArray[np.int64],
    coefficients: FloatArray,
    products: FloatArray,
    targets: FloatArray,
) -> None:
    """Some sweeps of coordinate descent, from the present coefficients, under the bounds at 0."""
    size = len(coefficients)
    matrix = products.copy()
    right = targets.copy()
    for i in range(size):
        matrix[i, i] += _RIDGE * products[i, i] + 1e-9
    # Each slope follows the one before it, the first one the prior; a jump is believed to be small.
    cost = coefficients[0]
    before, before_width = -1, 1.0
    for i in range(len(knots) - 1):
        at = _NUM_LINEAR + i
        width = float(knots[i + 1] - knots[i])
        cost += coefficients[at]
        strength = _SMOOTHNESS / (cost * cost)
        if width == 1.0 and i > 0:
            matrix[at, at] += strength
            continue
        matrix[at, at] += strength
        if before < 0:
            right[at] += strength * width * _PRIOR_ROW * coefficients[0]
        else:
            factor = width / before_width
            matrix[at, before] -= strength * factor
            matrix[before, at] -= strength * factor
            matrix[before, before] += strength * factor * factor
        before, before_width = at, width
    for _ in range(_SWEEPS):
        for i in range(size):
            gap = right[i]
            for j in range(size):
                gap -= matrix[i, j] * coefficients[j]
            coefficients[i] = max(0.0, coefficients[i] + gap / matrix[i, i])
    # The fixed cost keeps every ratio finite.
    coefficients[0] = max(coefficients[0], 1e-6)
