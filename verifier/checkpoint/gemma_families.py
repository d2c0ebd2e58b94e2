"""The rows of `families.FAMILIES` of Gemma's generations."""

from collections.abc import Mapping
from typing import Any

from verifier.checkpoint.family import ExpertNames, Family, Ropes, Windows

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
_GEMMA4: dict[str, Any] = {
    **{key: _GEMMA[key] for key in _GEMMA if key != "query_pre_attn_scalar"},
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
# transformers heeds no others.
_GEMMA4_CONSTANTS = {"sliding_window_pattern": 6, "rope_theta": None, "rope_scaling": None}
_GEMMA4_FIELDS: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "has_query_key_norms": True,
    "norms_values": True,
    "norms": _GEMMA_NORMS,
    "activation_key": "hidden_activation",
    "scales_embeddings": True,
    "attention_scaling": 1.0,
    "has_full_heads": True,
    "has_layer_scalars": True,
    "ends_full": True,
    "reads_media_ahead": True,
    "windows": Windows.PATTERN,
    "ropes": Ropes.PER_LAYER_TYPE,
}

GEMMAS: Mapping[str, Family] = {
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
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        defaults={
            **_GEMMA4,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "enable_moe_block": False,
            "num_experts": None,
            "num_experts_per_tok": None,
            "moe_intermediate_size": None,
        },
        constants=_GEMMA4_CONSTANTS,
        experts=ExpertNames(
            router="router.proj",
            gate="experts.{expert}.gate_proj",
            up="experts.{expert}.up_proj",
            down="experts.{expert}.down_proj",
            count_key="num_experts",
            width_key="moe_intermediate_size",
            normalises_key=None,
            shared="mlp",
            shared_width_key="intermediate_size",
            is_beside_mlp=True,
        ),
        aliases={"top_k_experts": "num_experts_per_tok"},
        **_GEMMA4_FIELDS,
    ),
    "gemma4_unified_text": Family(
        architecture="Gemma4UnifiedForCausalLM",
        defaults={
            **_GEMMA4,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
            "max_position_embeddings": 262_144,
        },
        constants=_GEMMA4_CONSTANTS,
        **_GEMMA4_FIELDS,
    ),
}
