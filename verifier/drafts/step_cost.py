"""What a step costs by its number of rows, learned from the durations of steps.

    seconds = pace * curve(rows)

The curve is known at some numbers of rows, and straight between them. A step moves the two next to
its rows, the less the more steps they have met. Where no step was, a row costs half of what rows
cost so far, so drafts are tried a few more at a time. `pace` follows a machine that becomes slower
as a whole, and longer texts, so that what is known of other rows stays comparable. A step that
another process held up counts little, unless it is the first of its rows; that one counts for no
more than in proportion to fewer rows, and the second replaces it if it is shorter.

What is known may be out of date, or come from a step that was held up. So who decides takes it for
the cheaper, the longer no step had so many rows: what seems twice as dear is tried again after
`_PATIENCE` steps, what seems little dearer than the best much sooner, and what was never tried
after `_FIRST_PATIENCE`.

Pure arithmetic; knows no clock, sequence or model.
"""

import math

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

FloatArray = npt.NDArray[np.float64]

_PATIENCE, _FIRST_PATIENCE = 8192.0, 256.0
# What a row costs where nothing is known, as a share of what rows cost so far.
_NEW_ROW = 0.5
# How far the curve and the pace follow a step, and the most that its error counts, in logarithms.
_CURVE_RATE, _PACE_RATE, _MOST_ERROR = 0.05, 0.1, 0.3
_LEAST_S, _MOST_S = 1e-9, 1e9

# The columns of a curve: rows, their cost, the number of steps that taught it, the last of them.
_ROWS, _COST, _STEPS, _LAST = range(4)
# What `new_pace` has: seconds of a unit of cost, 0 before the first step; the number of steps.
_PACE, _NOW = range(2)


def new_curve(max_rows: int) -> FloatArray:
    """[N, 4], for 1 to `max_rows` rows: each number of them up to 8, then a quarter more each."""
    rows = [1, 2]
    while rows[-1] < max_rows:
        rows.append(rows[-1] + max(1, rows[-1] // 4))
    curve = np.zeros((len(rows), 4))
    curve[:, _ROWS] = rows
    curve[:, _COST] = 1.0 + _NEW_ROW * (curve[:, _ROWS] - 1.0)
    return curve


def new_pace() -> FloatArray:
    """[2]; belongs to a curve."""
    return np.zeros(2)


@kernel
def _at(curve: FloatArray, rows: float) -> tuple[int, float]:
    """The last number of rows before `rows`, and how far these are on the way to the next one."""
    i = 0
    while i < len(curve) - 2 and curve[i + 1, _ROWS] <= rows:
        i += 1
    share = (rows - curve[i, _ROWS]) / (curve[i + 1, _ROWS] - curve[i, _ROWS])
    return i, min(max(share, 0.0), 1.0)


@kernel
def cost_of(curve: FloatArray, rows: float) -> float:
    """What a step of so many rows is expected to cost."""
    i, share = _at(curve, rows)
    cost: float = (1.0 - share) * curve[i, _COST] + share * curve[i + 1, _COST]
    return cost


@kernel
def costs_from(curve: FloatArray, pace: FloatArray, num_rows: int, out: FloatArray) -> None:
    """Sets `out` to what decides: the costs of `num_rows` rows, one more, and so on, the cheaper,
    the longer ago.
    """
    patience = np.where(curve[:, _STEPS] > 0.0, _PATIENCE, _FIRST_PATIENCE)
    costs = curve[:, _COST] * patience / (patience + pace[_NOW] - curve[:, _LAST])
    for j in range(len(out)):
        i, share = _at(curve, num_rows + j)
        out[j] = (1.0 - share) * costs[i] + share * costs[i + 1]


@kernel
def observe(
    curve: FloatArray, pace: FloatArray, rows: float, duration_s: float, is_decoding: bool
) -> float:
    """Learns from a step; returns the seconds that were expected of it.

    Args:
        is_decoding: only such steps change the pace, as rows of prompts cost something else.
    """
    duration_s = min(max(duration_s, _LEAST_S), _MOST_S)
    i, share = _at(curve, rows)
    expected = cost_of(curve, rows)
    if pace[_PACE] == 0.0:
        pace[_PACE] = duration_s / expected
    expected_s: float = pace[_PACE] * expected
    error = math.log(duration_s / expected_s)
    clipped = min(max(error, -_MOST_ERROR), _MOST_ERROR)
    pace[_NOW] += 1.0
    known = 0.0
    for k, part in ((i, 1.0 - share), (i + 1, share)):
        num_steps = curve[k, _STEPS]
        if part == 0.0:
            continue
        if num_steps == 0.0 or (num_steps < 1.5 and error < 0.0):
            curve[k, _COST] = min(curve[k, _COST] * math.exp(error), _in_proportion(curve, k))
        else:
            rate = part * max(_CURVE_RATE, 1.0 / (1.0 + num_steps))
            curve[k, _COST] *= math.exp(rate * clipped)
            known += part * (1.0 - rate)
        curve[k, _STEPS] += part
        if part >= 0.5:
            curve[k, _LAST] = pace[_NOW]
    if is_decoding:
        pace[_PACE] *= math.exp(_PACE_RATE * known * clipped)
    _fill(curve)
    return expected_s


@kernel
def _in_proportion(curve: FloatArray, k: int) -> float:
    """What a number of rows costs, if each costs as much as with fewer rows."""
    for before in range(k - 1, -1, -1):
        if curve[before, _STEPS] > 0.0:
            cost: float = curve[before, _COST] * curve[k, _ROWS] / curve[before, _ROWS]
            return cost
    return np.inf


@kernel
def _fill(curve: FloatArray) -> None:
    """Sets the costs where no step was, never above those of more rows."""
    before = -1
    for i in range(len(curve)):
        if curve[i, _STEPS] == 0.0:
            if before >= 0:
                rise = 1.0 + _NEW_ROW * (curve[i, _ROWS] / curve[before, _ROWS] - 1.0)
                curve[i, _COST] = curve[before, _COST] * rise
            continue
        for k in range(before + 1, i):
            if before < 0:
                rise = 1.0 + _NEW_ROW * (curve[i, _ROWS] / curve[k, _ROWS] - 1.0)
                curve[k, _COST] = curve[i, _COST] / rise
            else:
                curve[k, _COST] = min(curve[k, _COST], curve[i, _COST])
        before = i
