"""A mixture of experts: each token's MLP is the weighted sum of a few experts' MLPs.

Tokens are grouped by expert, and each expert that has any computes them in two products. How many
each has is copied to the host, so a layer waits for the device once.
"""

import torch

from verifier.cpu.weights import Activation
from verifier.gpu.operations import Operations
from verifier.gpu.weights import Experts


def mix_experts(
    experts: Experts, rows: torch.Tensor, operations: Operations, activation: Activation
) -> torch.Tensor:
    """The weighted sums [T, H] of rows [T, H]; both of the model's dtype."""
    per_token = experts.num_per_token
    logits = operations.linear(rows, experts.router).float()
    weights, chosen = logits.softmax(dim=-1).topk(per_token, dim=-1)
    if experts.normalises:
        weights /= weights.sum(dim=-1, keepdim=True)
    chosen = chosen.flatten()
    # Places [T * per_token] in the order of their experts.
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=len(experts.down)).tolist()
    inputs = rows[order // per_token]
    outputs = rows.new_empty(len(chosen), rows.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        gate_up = experts.gate_up[expert](inputs[start : start + count])
        gated = operations.gate(gate_up, activation)
        outputs[order[start : start + count]] = experts.down[expert](gated)
        start += count
    by_token = outputs.view(len(rows), per_token, -1).float()
    return (by_token * weights[:, :, None]).sum(dim=1).to(rows.dtype)
