"""A decoder's weights on their device.

Shape legend: H hidden size, D head_dim of a layer, I intermediate size, E experts, V vocabulary, P
pairs of a rotary embedding, S a token's input of a layer.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verifier.checkpoint.model_config import ModelConfig
from verifier.gpu.groups import GroupedWeight
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

    gate_up: torch.Tensor | GroupedWeight  # [E, 2 * I, H]: gate, then up; of the model's dtype
    down: torch.Tensor | GroupedWeight  # [E, H, I]
    # [E, 2 * I] and [E, H], of the model's dtype.
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideMlp:
    """What a mixture has that is computed of the hidden state beside an MLP (Gemma 4), both of
    whose outputs are normalised before they are added. Norms are [H] float32.
    """

    mlp: Mlp
    router_norm: torch.Tensor  # of what the router sees
    input_norm: torch.Tensor  # of what the experts see
    output_norm: torch.Tensor
    mlp_output_norm: torch.Tensor
    factors: torch.Tensor  # [E] float32, of the experts' outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP."""

    router: Linear  # E outputs
    weights: ExpertWeights
    num_per_token: int
    # Whether the weights of a token's chosen experts are divided by their sum.
    normalises: bool
    beside_mlp: BesideMlp | None = None
    # An expert of all tokens, and the logit whose sigmoid multiplies its output.
    shared: Mlp | None = None
    shared_gate: Linear | None = None  # 1 output


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta net but for its last product, see `layers.deltas`.

    Shape legend: J inputs that a convolution's output sees, C its channels, V value heads.
    """

    # C outputs: queries, keys and values, head by head; then the gates of all values.
    inputs: Linear
    # 2 * V outputs: what steps are made of, then decays.
    numbers: Linear
    # All float32. [J, C], the oldest input first.
    convolution: torch.Tensor
    # [V]: how fast states decay, a positive factor; what is added to the number that scales it.
    decay_rate: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor  # [value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What a layer does with its own input of a token (Gemma 4): a gated MLP of the hidden state
    that has that input in place of the up projection.
    """

    gate: Linear  # S outputs
    down: Linear  # H outputs
    norm: torch.Tensor  # [H] float32, of the output, before it is added


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Inputs [S] of every layer: the sum of a norm of the embedding's projection, and of an
    embedding of their own; divided by the root of 2.
    """

    size: int  # S
    embeddings: torch.Tensor  # [at least V, layers * S], to be multiplied by the root of S
    projection: Linear  # layers * S outputs, to be divided by the root of H
    norm: torch.Tensor  # [S] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Weights of norms are float32, as they are multiplied (Gemma's: 1 +
    weight).
    """

    input_norm: torch.Tensor | None  # [H], before the attention; None: there is none (OLMo)
    # In place of attention, for which there is then nothing.
    delta: DeltaNet | None
    # Query heads, key heads, value heads, D outputs each; query heads alone with another layer's.
    qkv: Linear | None
    # [heads * D]: logits whose sigmoids multiply attention's outputs.
    gates: Linear | None
    head_norms: torch.Tensor | None  # as in `Operations.rotate_and_store`
    # [heads] float32: logits of a token without a value, which attention sees beside the others.
    sinks: torch.Tensor | None
    output: Linear
    # Norms of the attention's and the MLP's output, before it is added (Gemma, OLMo). [H]
    attention_output_norm: torch.Tensor | None
    mlp_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None  # [H], before the MLP; None: there is none
    mlp: Mlp | Experts
    layer_input: LayerInput | None  # after the MLP
    # Factor of the hidden state after the layer; with one, there is a norm of its last update.
    scale: float
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
    per_layer_inputs: PerLayerInputs | None
    layers: list[Layer]
    # [1, P] float32 of each of `config.rotaries`, or [2, P]: of short sequences, of long ones.
    inv_freqs: list[torch.Tensor]

    @property
    def keeps_codes(self) -> bool:
        """Whether weights of layers are codes, as the checkpoint has them."""
        return any(isinstance(part, GroupedWeight) for part in _parts_of(self))

    @property
    def grouped(self) -> list[GroupedWeight]:
        """The layers' weights that are in groups."""
        return [part.weight for part in _parts_of(self) if isinstance(part, GroupedLinear)]


def _parts_of(weights: Any) -> Iterator[Any]:
    """All that weights consist of, themselves included."""
    yield weights
    inner: list[Any] = []
    if isinstance(weights, list):
        inner = weights
    elif dataclasses.is_dataclass(weights):
        inner = [getattr(weights, field.name) for field in dataclasses.fields(weights)]
    for each in inner:
        yield from _parts_of(each)
