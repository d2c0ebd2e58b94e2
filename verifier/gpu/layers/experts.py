"""A mixture of experts: each token's MLP is the weighted sum of a few experts' MLPs.

Shape legend: T tokens, J experts per token, E experts, H hidden size, I an expert's size.
"""

from typing import Protocol

import torch

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.operations import Operations
from verifier.gpu.plain import PlainOperations
from verifier.gpu.weights import Experts, ExpertWeights, Mlp


class Mixture(Protocol):
    """How the chosen experts are computed and added."""

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        experts: ExpertWeights,
        activation: Activation,
    ) -> torch.Tensor:
        """The weighted sums [T, H], added in float32 and rounded once.

        Args:
            rows: [T, H]. Contiguous, as are all others, and on one device.
            chosen: [T, J] int64, the tokens' experts; different ones of a token.
            weights: [T, J] float32.
            experts: of the dtype of rows, or codes.
        """
        ...


def mix_experts(
    experts: Experts,
    rows: torch.Tensor,
    activation: Activation,
    router_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sums [T, H] of rows [T, H]; both of the model's dtype. A token's experts are the
    likeliest ones, of equals the first: 16-bit logits are often equal, and `topk` promises nothing.

    Args:
        router_rows: [T, H], what the router sees; None: the rows.
    """
    logits = experts.router(rows if router_rows is None else router_rows).float()
    ordered = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = (each[:, : experts.num_per_token].contiguous() for each in ordered)
    if experts.normalises:
        weights /= weights.sum(dim=-1, keepdim=True)
    if experts.beside_mlp is not None:
        weights *= experts.beside_mlp.factors[chosen]
    mixture = mixture_for(rows.device)
    return mixture(rows, chosen, weights, experts.weights, activation)


def run_mlp(
    mlp: Mlp, rows: torch.Tensor, activation: Activation, operations: Operations
) -> torch.Tensor:
    """[T, H] of rows [T, H]."""
    return mlp.down(operations.gate(mlp.gate_up(rows), activation))


def mix_with_shared(
    experts: Experts, rows: torch.Tensor, activation: Activation, operations: Operations
) -> torch.Tensor:
    """As `mix_experts`, with the output of the expert of all tokens."""
    assert experts.shared is not None
    assert experts.shared_gate is not None
    factors = experts.shared_gate(rows).float().sigmoid_()
    output = run_mlp(experts.shared, rows, activation, operations)
    mixed = mix_experts(experts, rows, activation)
    return (mixed.float() + factors * output.float()).to(rows.dtype)


def mix_beside_mlp(
    experts: Experts,
    rows: torch.Tensor,
    hidden: torch.Tensor,
    activation: Activation,
    operations: Operations,
    *,
    eps: float,
) -> torch.Tensor:
    """The sum [T, H] of an MLP's output and a mixture's, both normalised.

    Args:
        rows: [T, H], what the MLP sees.
        hidden: [T, H] float32, the residual stream.
    """
    beside = experts.beside_mlp
    assert beside is not None

    def norm(of: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return operations.add_norm(of.float(), None, None, weight, eps=eps, dtype=dtype)

    mixed = mix_experts(
        experts,
        norm(hidden, beside.input_norm, rows.dtype),
        activation,
        norm(hidden, beside.router_norm, rows.dtype),
    )
    output = run_mlp(beside.mlp, rows, activation, operations)
    both = norm(output, beside.mlp_output_norm, torch.float32)
    return both.add_(norm(mixed, beside.output_norm, torch.float32)).to(rows.dtype)


def mixture_for(device: torch.device) -> Mixture:
    """Triton's on a GPU, torch's elsewhere."""
    if device.type == "cuda":
        from verifier.gpu.kernels.mixture import mix

        return mix
    return plain_mixture


def plain_mixture(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """Expert by expert, for CPUs; the oracle of the kernels. Reads how many tokens each has."""
    linear, operations = torch.nn.functional.linear, PlainOperations()
    by_token = rows.new_zeros(*chosen.shape, rows.shape[1])

    def multiply(
        rows: torch.Tensor,
        weight: torch.Tensor | GroupedWeight,
        bias: torch.Tensor | None,
        expert: int,
    ) -> torch.Tensor:
        if isinstance(weight, GroupedWeight):
            own = weight.of_expert(expert).widened(rows.dtype)
        else:
            own = weight[expert]
        return linear(rows, own, None if bias is None else bias[expert])

    for expert in chosen.unique().tolist():
        places = (chosen == expert).nonzero(as_tuple=True)
        gate_up = multiply(rows[places[0]], experts.gate_up, experts.gate_up_bias, expert)
        gated = operations.gate(gate_up, activation)
        by_token[places] = multiply(gated, experts.down, experts.down_bias, expert)
    return (by_token.float() * weights[:, :, None]).sum(dim=1).to(rows.dtype)
