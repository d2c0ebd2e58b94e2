"""The families of models that GGUF files hold: their types in transformers, and their keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from servicekit.gguf.header import GgufError, GgufHeader

ARCHITECTURE = "general.architecture"
# Metadata key, after the architecture → key of config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_EXPERTS_USED = {"expert_used_count": "num_experts_per_tok"}
_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERT_SIZES = {
    **_EXPERTS_USED,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED_EXPERT_SIZES = {
    **_EXPERT_SIZES,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_DELTA_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    # All value heads together, until `_delta_net` divides it.
    "ssm.inner_size": "linear_value_head_dim",
    "full_attention_interval": "full_attention_interval",
}
# Layers at the end that predict several tokens, and are left out.
UNUSED_LAYERS = "nextn_predict_layers"
_SILU = {"hidden_act": "silu", "dtype": "float16"}
# Numbers of these models are beyond float16.
_SILU_BFLOAT16 = {"hidden_act": "silu", "dtype": "bfloat16"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type of transformers.

    Attributes:
        constants: of its config.json, which the format does not tell.
        keys: as `SIZES`, of this family alone.
        num_layers_of_narrow_queries: of the one size whose attention scores are divided by the root
            of the hidden size over the heads, not of head_dim.
        lists: keys whose values may be lists, of a number or a truth for each layer. Families that
            have some tell sliding and full layers apart (`layers.py`).
    """

    model_type: str
    architecture: str
    constants: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    keys: Mapping[str, str] = field(default_factory=dict)
    num_layers_of_narrow_queries: int = 0
    lists: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_type="llama", architecture="LlamaForCausalLM"),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "smollm3": Family(
        model_type="smollm3", architecture="SmolLM3ForCausalLM", constants=_SILU_BFLOAT16
    ),
    "olmo2": Family(model_type="olmo2", architecture="Olmo2ForCausalLM", constants=_SILU_BFLOAT16),
    "olmo3": Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={"attention.sliding_window": "sliding_window"},
        lists=("attention.sliding_window_pattern",),
    ),
    "granite": Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "qwen3moe": Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        constants={**_SILU, "norm_topk_prob": True},
        keys=_EXPERT_SIZES,
    ),
    "qwen3next": Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={**_SHARED_EXPERT_SIZES, **_DELTA_SIZES},
    ),
    "qwen35": Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        constants=_SILU_BFLOAT16,
        keys=_DELTA_SIZES,
    ),
    "qwen35moe": Family(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={**_SHARED_EXPERT_SIZES, **_DELTA_SIZES},
    ),
    "gemma2": Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        constants=_GELU,
        keys=_GEMMA_KEYS,
        num_layers_of_narrow_queries=46,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        constants=_GELU,
        keys={**_GEMMA_KEYS, "rope.freq_base_swa": "rope_local_base_freq"},
        num_layers_of_narrow_queries=62,
    ),
    "gemma4": Family(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        constants=_GELU,
        keys={
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window": "sliding_window",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        lists=(
            "attention.sliding_window_pattern",
            "feed_forward_length",
            "attention.head_count_kv",
        ),
    ),
    "phi3": Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
    ),
    "gpt-oss": Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={
            **_EXPERTS_USED,
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
}
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={**_EXPERTS_USED, "expert_count": "num_local_experts"},
)


def unused_layers(header: GgufHeader) -> range:
    """Layers that the model is computed without."""
    architecture = header.metadata.get(ARCHITECTURE)
    count, num_layers = (
        header.metadata.get(f"{architecture}.{key}", 0) for key in (UNUSED_LAYERS, "block_count")
    )
    if type(count) is not int or type(num_layers) is not int or not 0 <= count <= num_layers:
        raise GgufError(f"{header.path}: {architecture}.{UNUSED_LAYERS}: {count} of {num_layers}")
    return range(num_layers - count, num_layers)


def model_type_of(header: GgufHeader) -> str:
    """The model's type in transformers.

    Raises:
        GgufError: it is not served.
    """
    return family_of(header).model_type


def family_of(header: GgufHeader) -> Family:
    architecture = str(header.metadata.get(ARCHITECTURE))
    if architecture == "llama" and _is_set(header.metadata.get("llama.expert_count")):
        return MIXTRAL
    if architecture == "olmo2" and _is_set(header.metadata.get("olmo2.attention.sliding_window")):
        return FAMILIES["olmo3"]
    if architecture not in FAMILIES:
        raise GgufError(
            f"{header.path}: {ARCHITECTURE}: {architecture} is not served from this format"
        )
    return FAMILIES[architecture]


def _is_set(value: Any) -> bool:
    """Whether a number is there and not 0; a value of another kind is refused by its key later."""
    return type(value) is int and value != 0
