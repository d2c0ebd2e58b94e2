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

Example: a step costs 4 + rows, and two sequences have drafts that stand with 0.9 0.8 and 0.5 0.1.
No draft: 2 / 6 = 0.333. The likeliest: 2.9 / 7 = 0.414. The next: 3.7 / 8 = 0.463.
4.2 / 9 = 0.467. 4.3 / 10 = 0.43. So 3 drafts are verified, 2 and 1.
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A draft that is less likely to stand is never verified.
_LEAST = 0.01


@kernel
def allocate(
    survivals: FloatArray,
    expected: float,
    decode_costs: FloatArray,
    costs: FloatArray,
    depths: IntArray,
) -> None:
    """Sets `depths`.

    Args:
        survivals: [N, K]: descending along each row; 0 where a sequence has no draft.
        expected: tokens of the step without drafts.
        decode_costs: [D + 1]: of the step without chunks, by the number of drafts of all sequences,
            D at most.
        costs: [D + 1]: of the step with its chunks.
        depths: [N], for the results.
    """
    likelihoods = survivals.ravel()
    # Of equal ones, a sequence's first comes first.
    likeliest = np.argsort(-likelihoods, kind="mergesort")[: len(costs) - 1]
    # Expected tokens by number of drafts.
    totals = np.empty(len(costs))
    totals[0] = expected
    best_rate = expected / decode_costs[0]
    most = 0
    while most < len(likeliest) and likelihoods[likeliest[most]] >= _LEAST:
        totals[most + 1] = totals[most] + likelihoods[likeliest[most]]
        most += 1
        best_rate = max(best_rate, totals[most] / decode_costs[most])
    best = np.argmax(totals[: most + 1] - best_rate * costs[: most + 1])
    depths[:] = 0
    for place in likeliest[:best]:
        depths[place // survivals.shape[1]] += 1
