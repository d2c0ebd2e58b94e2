"""A decoder as the kernels of this room compute it: dimensions, and weights packed for products.

A product's weight [N, K] (N outputs, K inputs, as torch's linear layers have it) is packed as
[ceil(N / 16), K, 16]: a block of 16 outputs lies side by side for each input. Outputs past N have
weights of zero. Weights in groups are packed as `kernels.group_records` says.

Shape legend: H hidden size, D head_dim of a layer, I intermediate size, E experts, V vocabulary,
P input of a layer.
"""

from dataclasses import dataclass

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.weight_types import Activation, BitsArray, FloatArray, Rotary, WeightType


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some outputs of a packed weight, a multiple of 16."""

    # [ceil(N / 16), K, 16], or in groups [ceil(N / 16), records, bytes of a record]; of experts one
    # more dimension, [E, ...].
    blocks: BitsArray
    # A key of `group_formats.FORMATS`; None: not in groups, but of the type that its blocks have.
    form: str | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[-3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One packed weight, or the packed weights of several experts."""

    # One, unless the model's linear weights are in groups.
    parts: list[Part]
    # N, without padding.
    num_outputs: int
    # K.
    depth: int
    # [ceil(N / 16) * 16], of experts [E, ...]: factors of the outputs, bias excluded.
    scales: FloatArray | None = None
    # Likewise; not multiplied by the factors.
    bias: FloatArray | None = None

    @property
    def num_blocks(self) -> int:
        return sum(part.num_blocks for part in self.parts)

    @property
    def blocks(self) -> BitsArray:
        """Of a weight of one part."""
        (part,) = self.parts
        return part.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideMlp:
    """What a mixture has that is computed of the hidden state beside an MLP (Gemma 4), both of
    whose outputs are normalised before they are added. Norms are [H].
    """

    router_norm: FloatArray  # of what the router sees
    input_norm: FloatArray  # of what the experts see
    output_norm: FloatArray
    mlp_output_norm: FloatArray
    factors: FloatArray  # [E], of the experts' outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP."""

    num_experts: int

    # [E, H]: logits of the experts.
    router: Matrix
    gate_up: Matrix
    down: Matrix
    num_per_token: int
    # Whether the weights of a token's chosen experts are divided by their sum.
    normalises: bool
    # An expert of all tokens: its weights, as a layer's `gate_up` and `down`, and those [H] of the
    # logit whose sigmoid multiplies its output. None: there is none; no logit if the expert is the
    # MLP that the mixture is beside.
    shared_gate_up: Matrix | None = None
    shared_down: Matrix | None = None
    shared_gate: FloatArray | None = None
    beside_mlp: BesideMlp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """What a gated delta net has beside its products, see `kernels.delta`.

    Shape legend: J inputs that a convolution's output sees, C its channels, V value heads.
    """

    # [J, C], the oldest input first; all queries, keys and values.
    convolution: FloatArray
    # [V]: how fast states decay, a positive factor; what is added to the number that scales it.
    decay_rate: FloatArray
    decay_bias: FloatArray
    norm: FloatArray  # [value_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What a layer does with its own input of a token (Gemma 4): a gated MLP of the hidden state
    that has that input in place of the up projection.
    """

    gate: Matrix  # [P, H]
    down: Matrix  # [H, P]
    norm: FloatArray  # [H], of the output, before it is added


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Inputs [P] of every layer: the sum of a norm of the embedding's projection, and of an
    embedding of their own; divided by the root of 2.
    """

    size: int  # P, a multiple of 16
    # [at least V, layers * P], to be multiplied by the root of P: not packed, of `other_type`; or
    # in groups packed.
    embeddings: BitsArray | Matrix
    projection: Matrix  # [layers * P, H]
    norm: FloatArray  # [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. Weights of norms are as they are multiplied (Gemma's: 1 + weight)."""

    # The layer whose keys and values it attends to; None: its own.
    kv_layer: int | None
    # Of attention.
    num_kv_heads: int
    head_dim: int
    input_norm: FloatArray | None  # [H]
    # Outputs: query heads, key heads, value heads, D each; with gates, each query head's behind it;
    # with another layer's keys and values, query heads alone.
    # Of a gated delta net: those of `DeltaShape.inputs`, each rounded up to a multiple of 16.
    qkv: Matrix
    # [D], or of all heads together [heads * D].
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    value_norm: FloatArray | None  # [D]
    output: Matrix
    # Norms of the attention's and the MLP's output, before it is added (Gemma). [H]
    attention_output_norm: FloatArray | None
    mlp_output_norm: FloatArray | None
    mlp_norm: FloatArray | None  # [H], before the MLP
    # [2 * I']: gate, then up; I' is I rounded up to a multiple of 16, with outputs of zero between.
    gate_up: Matrix | None
    # Depth I'.
    down: Matrix | None
    # [heads]: logits of a token without a value, which attention sees beside the others (GPT-OSS).
    sinks: FloatArray | None
    # Instead of gate_up and down.
    experts: Experts | None
    # After the MLP.
    layer_input: LayerInput | None
    # Factor of the hidden state after the layer; with one, there is a norm of its last update.
    scale: float
    # How many tokens a token sees, itself included; 0: all before it.
    sliding_window: int
    # Index in `DecoderWeights.rotaries`.
    rotary: int
    # In place of attention, for which there are then no norms, sinks, window and rotary embedding.
    delta: DeltaNet | None = None

    @property
    def has_kv(self) -> bool:
        """Whether it keeps keys and values."""
        return self.delta is None and self.kv_layer is None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder."""

    hidden_size: int
    num_heads: int
    vocab_size: int
    norm_eps: float
    # Factor of query * key.
    attention_scaling: float
    # cap * tanh(x / cap) of attention scores, and of logits; 0: none.
    attention_softcap: float
    logits_softcap: float
    # Factor of embeddings (Gemma).
    embedding_scale: float
    activation: Activation
    # Whether a head's output is multiplied by the sigmoid of a gate.
    gates_attention: bool
    # Of the layers that are gated delta nets.
    delta: DeltaShape | None
    per_layer_inputs: PerLayerInputs | None
    rotaries: list[Rotary]
    layers: list[Layer]
    final_norm: FloatArray  # [H]
    # [V, H]: not packed, of `other_type`; in groups packed. None: the head's weights are them.
    embeddings: BitsArray | Matrix | None
    head: Matrix
    # The type of the layers' linear weights, experts included.
    linear_type: WeightType
    # The type of K/V, and unless weights are in groups of the head, the embeddings and the router;
    # never FP8.
    other_type: WeightType


def deepest(weights: DecoderWeights) -> int:
    """Inputs of the deepest product."""
    depths = [weights.hidden_size]
    for layer in weights.layers:
        experts = layer.experts
        downs = (experts.down, experts.shared_down) if experts else (layer.down,)
        depths += [matrix.depth for matrix in (layer.output, *downs) if matrix is not None]
    return max(depths)


def gate_ups(layer: Layer) -> list[Matrix]:
    """Of its MLP, or of its experts and the one that they share."""
    experts = layer.experts
    own = (experts.gate_up, experts.shared_gate_up) if experts else (layer.gate_up,)
    return [matrix for matrix in own if matrix is not None]
