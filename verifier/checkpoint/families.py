"""The families of models that the decoder computes: what differs between them, as a table.

A family is added by its row in `FAMILIES`, and a configuration of it in the oracle test
(tests/verifier/cpu/test_loader.py), which compares logits with transformers'. What a row cannot
say needs a field of `Family`, and code in `model_config.py` or `description.py`.
"""

from collections.abc import Mapping
from typing import Any

from verifier.checkpoint.family import ExpertNames, Family, Ropes, Windows
from verifier.checkpoint.gemma_families import GEMMAS

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

_DELTA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    # Heads that predict several tokens are left out.
    "mtp_num_hidden_layers": 0,
}
# Attention in some layers, gated delta nets in the others.
_DELTA: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "output_bias": "attention_bias",
    "has_query_key_norms": True,
    "norm_offset": 1.0,
    "gates_attention": True,
    "constants": {"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    "unused": ("mtp.",),
    "windows": Windows.DELTA,
    "ropes": Ropes.PARTIAL,
}
_SHARED_EXPERT: dict[str, Any] = {
    "router": "mlp.gate",
    "gate": "mlp.experts.{expert}.gate_proj",
    "up": "mlp.experts.{expert}.up_proj",
    "down": "mlp.experts.{expert}.down_proj",
    "count_key": "num_experts",
    "width_key": "moe_intermediate_size",
    "shared": "mlp.shared_expert",
    "shared_gate": "mlp.shared_expert_gate",
    "shared_width_key": "shared_expert_intermediate_size",
}

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
    **GEMMAS,
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
        ropes=Ropes.PARTIAL_OR_LONG,
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
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
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
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        defaults={
            **_DELTA_DEFAULTS,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
        },
        experts=ExpertNames(**_SHARED_EXPERT, normalises_key="norm_topk_prob"),
        **_DELTA,
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        defaults=_DELTA_DEFAULTS,
        **_DELTA,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        defaults={
            **_DELTA_DEFAULTS,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            # Of no layer.
            "intermediate_size": 512,
        },
        experts=ExpertNames(**_SHARED_EXPERT, normalises_key=None),
        **{
            **_DELTA,
            "constants": {**_DELTA["constants"], "decoder_sparse_step": 1, "norm_topk_prob": True},
        },
    ),
}
