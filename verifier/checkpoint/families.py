"""The families of models that the decoder computes: what differs between them, as a table.

A family is added by its row in `FAMILIES`, and a configuration of it in the oracle test
(tests/verifier/cpu/test_loader.py), which compares logits with transformers'. What a row cannot
say needs a field here, and code in `model_config.py` or `description.py`.
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


class Ropes(enum.Enum):
    """How rotary embeddings are configured."""

    ONE = enum.auto()
    # Of the first dimensions of a head only, as `partial_rotary_factor` says; or longrope.
    PARTIAL = enum.auto()
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

_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
}
_GEMMA_NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_QWEN_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

# Norms of what attention and MLP put out, none of what goes in.
_OLMO: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "has_query_key_norms": True,
    "norms_projections": True,
    "norms": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}
_OLMO_DEFAULTS = {"attention_bias": False, "rms_norm_eps": 1e-5, "eos_token_id": 50279}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"attention_bias": False, "mlp_bias": False, "eos_token_id": 2},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
        windows=Windows.EVERY_LAYER,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS},
        qkv_bias=True,
        windows=Windows.LAST_LAYERS,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            **_QWEN_WINDOWS,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_query_key_norms=True,
        windows=Windows.LAST_LAYERS,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults={
            **_GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        activation_key="hidden_activation",
        scales_embeddings=True,
        scalar_key="query_pre_attn_scalar",
        has_attention_softcap=True,
        windows=Windows.PATTERN,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults={
            **_GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10_000.0,
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_query_key_norms=True,
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        activation_key="hidden_activation",
        scales_embeddings=True,
        scalar_key="query_pre_attn_scalar",
        windows=Windows.PATTERN,
        ropes=Ropes.PER_LAYER_TYPE,
        default_theta=1_000_000.0,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 32000,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        windows=Windows.EVERY_LAYER,
        ropes=Ropes.PARTIAL,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        defaults=_OLMO_DEFAULTS,
        **_OLMO,
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        defaults={
            **_OLMO_DEFAULTS,
            "sliding_window": 4096,
            "layer_types": None,
            "sliding_window_pattern": 4,
        },
        windows=Windows.PATTERN,
        ropes=Ropes.PER_LAYER_TYPE,
        default_theta=500_000.0,
        **_OLMO,
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        defaults={
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": 2,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": 128_001,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        skips_ropes=True,
        windows=Windows.NAMED,
        default_theta=2_000_000.0,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 2,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        windows=Windows.EVERY_LAYER,
        default_theta=1_000_000.0,
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{expert}.w1",
            up="block_sparse_moe.experts.{expert}.w3",
            down="block_sparse_moe.experts.{expert}.w2",
            count_key="num_local_experts",
            width_key="intermediate_size",
            normalises_key=None,
        ),
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_query_key_norms=True,
        windows=Windows.EVERY_LAYER,
        experts=ExpertNames(
            router="mlp.gate",
            gate="mlp.experts.{expert}.gate_proj",
            up="mlp.experts.{expert}.up_proj",
            down="mlp.experts.{expert}.down_proj",
            count_key="num_experts",
            width_key="moe_intermediate_size",
            normalises_key="norm_topk_prob",
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "layer_types": None,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            # What its rotary embedding tells, too.
            "initial_context_length": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        has_sinks=True,
        clamps_gates=True,
        windows=Windows.PATTERN,
        default_theta=150_000.0,
        experts=ExpertNames(
            router="mlp.router",
            gate="mlp.experts.{expert}.gate_proj",
            up="mlp.experts.{expert}.up_proj",
            down="mlp.experts.{expert}.down_proj",
            count_key="num_local_experts",
            width_key="intermediate_size",
            normalises_key=None,
            has_biases=True,
        ),
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ),
}
