"""A decoder's weights on their device.

Shape legend: H hidden size, D head_dim, I intermediate size, E experts, V vocabulary, P pairs of a
rotary embedding.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from verifier.checkpoint.model_config import ModelConfig
from verifier.gpu.groups import GroupedWeight, MxWeight
from verifier.gpu.operations import Operations


class Linear(Protocol):
    """A linear layer of K inputs and N outputs."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [T, N] of rows [T, K], in their dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLinear:
    """Weight [N, K] and bias [N] of the model's dtype."""

    operations: Operations
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.operations.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear:
    """Weight [N, K] in groups, and bias [N] of the model's dtype."""

    operations: Operations
    weight: GroupedWeight
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.operations.grouped_linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up)."""

    gate_up: Linear  # 2 * I outputs: gate, then up
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Of all experts of a mixture, each an MLP; I is an expert's."""

    gate_up: torch.Tensor | MxWeight  # [E, 2 * I, H]: gate, then up; of the model's dtype
    down: torch.Tensor | MxWeight  # [E, H, I]
    # [E, 2 * I] and [E, H], of the model's dtype.
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP."""

    router: Linear  # E outputs
    weights: ExpertWeights
    num_per_token: int
    # Whether the weights of a token's chosen experts are divided by their sum.
    normalises: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Weights of norms are float32, as they are multiplied (Gemma's: 1 +
    weight).
    """

    input_norm: torch.Tensor  # [H]
    qkv: Linear  # query heads, key heads, value heads, D outputs each
    head_norms: torch.Tensor | None  # [2, D]: of queries, of keys
    # [heads] float32: logits of a token without a value, which attention sees beside the others.
    sinks: torch.Tensor | None
    output: Linear
    # Norms of the attention's and the MLP's output, before it is added (Gemma). [H]
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor  # [H], before the MLP
    mlp: Mlp | Experts
    # How many tokens a token sees, itself included; None: all before it.
    sliding_window: int | None
    rotary: int  # index in `GpuWeights.inv_freqs`


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeights:
    """A whole decoder, all of it on one device. `dtype` is that of activations and K/V;
    `operations` compute with it.
    """

    config: ModelConfig
    operations: Operations
    dtype: torch.dtype
    device: torch.device
    embeddings: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]; the embeddings themselves if they are tied
    final_norm: torch.Tensor  # [H] float32
    layers: list[Layer]
    # [1, P] float32 of each of `config.rotaries`, or [2, P]: of short sequences, of long ones.
    inv_freqs: list[torch.Tensor]

    @property
    def keeps_codes(self) -> bool:
        """Whether weights of layers are codes, as the checkpoint has them."""
        mlps = [layer.mlp for layer in self.layers]
        mixtures = [mlp.weights for mlp in mlps if isinstance(mlp, Experts)]
        return bool(self.grouped) or any(isinstance(each.down, MxWeight) for each in mixtures)

    @property
    def grouped(self) -> list[GroupedWeight]:
        """The layers' weights that are in groups."""
        linears: list[Linear] = []
        for layer in self.layers:
            mlp = layer.mlp
            of_mlp = [mlp.gate_up, mlp.down] if isinstance(mlp, Mlp) else [mlp.router]
            linears += [layer.qkv, layer.output, *of_mlp]
        return [linear.weight for linear in linears if isinstance(linear, GroupedLinear)]
