"""What a family of models is: how its configuration, its tensors and its computation differ from
others'. `families.py` has them all.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Windows(enum.Enum):
    """Which layers see only `sliding_window` tokens."""

    NONE = enum.auto()
    EVERY_LAYER = enum.auto()
    # Those that `layer_types` names. Without the key: Qwen's, from `max_window_layers` on.
    LAST_LAYERS = enum.auto()
    # Without the key: all but every `sliding_window_pattern`-th.
    PATTERN = enum.auto()
    # Those that `layer_types` names, and no others.
    NAMED = enum.auto()
    # None; layers that `layer_types` does not name as full are gated delta nets. Without the key:
    # all but every `full_attention_interval`-th.
    DELTA = enum.auto()


class Ropes(enum.Enum):
    """How rotary embeddings are configured."""

    ONE = enum.auto()
    # Of the first dimensions of a head only, as `partial_rotary_factor` says.
    PARTIAL = enum.auto()
    # Likewise; or longrope.
    PARTIAL_OR_LONG = enum.auto()
    # One per layer type: full_attention, sliding_attention.
    PER_LAYER_TYPE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Tensors of a mixture of experts, below its layer, and the keys of its configuration."""

    router: str
    gate: str  # with {expert}
    up: str
    down: str
    count_key: str
    width_key: str
    # None: always divided by their sum.
    normalises_key: str | None
    # Of the router and of the experts.
    has_biases: bool = False
    # An expert of all tokens, whose output has a factor of its own, and the key of its width.
    shared: str | None = None
    shared_gate: str = ""
    shared_width_key: str = ""
    # Whether the expert of all tokens is an MLP beside the mixture, each with norms of its own, and
    # experts have factors (Gemma 4).
    is_beside_mlp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type of transformers.

    Attributes:
        architecture: the class that its checkpoints name.
        defaults: transformers' values of keys that a config.json may lack. Keys with no default,
            here or in `COMMON_DEFAULTS`, are required.
        qkv_bias, output_bias, mlp_bias: whether there are biases, or the key that says so.
        norm_offset: what is added to the weights of norms.
        norms: fields of `Layer` → names of norms of the hidden state.
        norms_projections: whether the norms of queries and keys are of all heads together.
        qkv, gate_up: names of the weights, in the order of their outputs.
        scalar_key: attention scores are divided by the root of this key; None: of head_dim.
        has_attention_softcap: whether attention heeds `attn_logit_softcapping`.
        has_multipliers: whether it has Granite's factors, of embeddings, attention scores, updates
            of the residual stream, and logits.
        has_sinks: whether attention has a logit of each head beside the scores, of a token that has
            no value.
        clamps_gates: whether the activation is `Activation.CLAMPED`, whatever its key says.
        skips_ropes: whether `no_rope_layers` tells which layers have a rotary embedding (1) and
            which have none (0).
        has_full_heads: whether full layers may have other sizes of heads than sliding ones, and
            `attention_k_eq_v` tells that their keys, before norm and rotation, are the values, too.
        norms_values: whether values are normalised, without weights.
        ends_full: whether the last layer is a full one, whatever `layer_types` says.
        reads_media_ahead: whether `use_bidirectional_attention` may be "vision": of images alone.
        has_layer_scalars: whether the hidden state is multiplied by a number after each layer.
        attention_scaling: the factor of attention scores; None: as `scalar_key` says.
        gates_attention: whether each head's output is multiplied by the sigmoid of a gate, whose
            weights follow those of the head's query.
        constants: values of keys that are this family's only ones.
        unused: how tensors begin that the model is computed without.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    has_query_key_norms: bool = False
    norms_projections: bool = False
    norm_offset: float = 0.0
    norms: Mapping[str, str] = field(
        default_factory=lambda: {
            "input_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
        }
    )
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation_key: str = "hidden_act"
    scales_embeddings: bool = False
    scalar_key: str | None = None
    has_attention_softcap: bool = False
    has_multipliers: bool = False
    skips_ropes: bool = False
    has_sinks: bool = False
    clamps_gates: bool = False
    has_full_heads: bool = False
    norms_values: bool = False
    ends_full: bool = False
    reads_media_ahead: bool = False
    has_layer_scalars: bool = False
    attention_scaling: float | None = None
    gates_attention: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    windows: Windows = Windows.NONE
    ropes: Ropes = Ropes.ONE
    default_theta: float = 10_000.0
    experts: ExpertNames | None = None
    # Other names of keys.
    aliases: Mapping[str, str] = field(default_factory=dict)


COMMON_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
