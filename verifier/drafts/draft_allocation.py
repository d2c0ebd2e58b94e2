"""Which sequences verify how many drafts in a step: the most expected tokens per second.

A draft brings a token with the probability that it and all drafts before it stand. These
probabilities descend along a sequence, so for any number of rows the best drafts are the likeliest
ones of all sequences. The step takes as many as maximise

    expected tokens / cost of the step

over all numbers of rows: where a tile of the model's kernels is begun, the rest of it may be cheap,
so the first number that does not pay is not the end.

Prefill chunks in the step are not the drafts' work: their time is spent in any case. So the best
rate is that of the step without its chunks, and with them the step takes as many drafts as maximise

    expected tokens - best rate * cost of the step

which is the same where there are none. The chunks' rows still decide what a further row costs.

A step that probes takes half as many drafts, or twice as many, unless that is known to be bad: so
the cost of other numbers of rows stays known. Where no draft pays, neither would show a mistake: a
caller can ask for some drafts all the same.

Example: a step costs 4 + rows, and two sequences have drafts that stand with 0.9 0.8 and 0.5 0.1.
No draft: 2 / 6 = 0.333. The likeliest: 2.9 / 7 = 0.414. The next: 3.7 / 8 = 0.463.
4.2 / 9 = 0.467. 4.3 / 10 = 0.43. So 3 drafts are verified, 2 and 1.
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.drafts.step_cost import costs_of_rows

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A draft that is less likely to stand is never verified.
_LEAST = 0.01
# The most that a probe may lose, of the step's time.
_PROBE_LOSS = 0.3


@kernel
def allocate(
    survivals: FloatArray,
    limits: IntArray,
    max_drafts: int,
    knots: IntArray,
    coefficients: FloatArray,
    expected: float,
    decode_rows: float,
    decode_cost: float,
    num_rows: float,
    cost: float,
    cost_per_draft: float,
    probe_factor: float,
    num_instead_of_none: int,
    depths: IntArray,
) -> None:
    """Sets `depths`.

    Args:
        survivals: [N, K]: descending along each row.
        limits: [N]: the most drafts of each sequence, K at most.
        max_drafts: the most of all.
        knots: of the step's cost; so `coefficients`.
        expected: tokens of the step without drafts.
        decode_rows: rows of the step without drafts and chunks.
        decode_cost: its cost, without the curve of rows.
        num_rows: rows of the step without drafts; so `cost`.
        cost_per_draft: what a draft costs beside the curve.
        probe_factor: 1, or by how much more or less than the best number to take.
        num_instead_of_none: how many drafts to take where it is best to take none.
        depths: [N], for the results.
    """
    likeliest = np.empty(limits.sum())
    count = 0
    for i in range(len(limits)):
        for j in range(limits[i]):
            if survivals[i, j] < _LEAST:
                break
            likeliest[count] = survivals[i, j]
            count += 1
    # Expected tokens by number of drafts, the likeliest first.
    totals = np.empty(count + 1)
    totals[0] = expected
    likeliest = np.sort(likeliest[:count])[::-1]
    for taken in range(count):
        totals[taken + 1] = totals[taken] + likeliest[taken]
    most = min(count, max_drafts)
    costs = np.empty(most + 1)
    costs_of_rows(knots, coefficients, decode_rows, costs)
    best_rate = 0.0
    for taken in range(most + 1):
        rate = totals[taken] / (decode_cost + cost_per_draft * taken + costs[taken])
        best_rate = max(best_rate, rate)
    if num_rows != decode_rows:
        costs_of_rows(knots, coefficients, num_rows, costs)
    best_count, best_value = 0, -np.inf
    for taken in range(most + 1):
        value = totals[taken] - best_rate * (cost + cost_per_draft * taken + costs[taken])
        if value > best_value:
            best_count, best_value = taken, value
    probed = min(int(best_count * probe_factor), most)
    if probed != best_count:
        worth = best_rate * (cost + cost_per_draft * probed + costs[probed])
        if totals[probed] - worth >= best_value - _PROBE_LOSS * worth:
            best_count = probed
    if best_count == 0:
        best_count = min(num_instead_of_none, most)
    least = likeliest[best_count - 1] if best_count else 2.0
    # First those above the least one taken, then as many equal ones as are left.
    left = best_count
    for i in range(len(limits)):
        depth = 0
        while depth < limits[i] and survivals[i, depth] > least:
            depth += 1
        depths[i] = depth
        left -= depth
    for i in range(len(limits)):
        while left > 0 and depths[i] < limits[i] and survivals[i, depths[i]] == least:
            depths[i] += 1
            left -= 1
