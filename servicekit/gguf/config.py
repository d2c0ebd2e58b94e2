"""A GGUF file's metadata as the config.json that transformers' models of its family have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servicekit.gguf.header import GgufError, GgufHeader

_LLAMA3_FACTORS = "rope_freqs.weight"
# longrope's, by their names in config.json.
_LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
ROPE_FACTORS = (_LLAMA3_FACTORS, *_LONGROPE_FACTORS.values())
"""Names of tensors that are no weights."""
_ARCHITECTURE = "general.architecture"
# Metadata key, after the architecture → key of config.json.
_SIZES = {
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
_UNUSED_LAYERS = "nextn_predict_layers"
_SILU = {"hidden_act": "silu", "dtype": "float16"}
# Numbers of these models are beyond float16.
_SILU_BFLOAT16 = {"hidden_act": "silu", "dtype": "bfloat16"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A model type of transformers.

    Attributes:
        constants: of its config.json, which the format does not tell.
        keys: as `_SIZES`, of this family alone.
        num_layers_of_narrow_queries: of the one size whose attention scores are divided by the root
            of the hidden size over the heads, not of head_dim.
    """

    model_type: str
    architecture: str
    constants: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    keys: Mapping[str, str] = field(default_factory=dict)
    num_layers_of_narrow_queries: int = 0


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(model_type="llama", architecture="LlamaForCausalLM"),
    "qwen2": _Family(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": _Family(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "smollm3": _Family(
        model_type="smollm3", architecture="SmolLM3ForCausalLM", constants=_SILU_BFLOAT16
    ),
    "olmo2": _Family(model_type="olmo2", architecture="Olmo2ForCausalLM", constants=_SILU_BFLOAT16),
    "granite": _Family(
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
    "qwen3moe": _Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        constants={**_SILU, "norm_topk_prob": True},
        keys=_EXPERT_SIZES,
    ),
    "qwen3next": _Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={**_SHARED_EXPERT_SIZES, **_DELTA_SIZES},
    ),
    "qwen35": _Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        constants=_SILU_BFLOAT16,
        keys=_DELTA_SIZES,
    ),
    "qwen35moe": _Family(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        constants=_SILU_BFLOAT16,
        keys={**_SHARED_EXPERT_SIZES, **_DELTA_SIZES},
    ),
    "gemma2": _Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        constants=_GELU,
        keys=_GEMMA_KEYS,
        num_layers_of_narrow_queries=46,
    ),
    "gemma3": _Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        constants=_GELU,
        keys={**_GEMMA_KEYS, "rope.freq_base_swa": "rope_local_base_freq"},
        num_layers_of_narrow_queries=62,
    ),
    "phi3": _Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
    ),
    "gpt-oss": _Family(
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
_MIXTRAL = _Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={**_EXPERTS_USED, "expert_count": "num_local_experts"},
)
# Whose values say nothing that the model computes with.
_PREFIXES_OF_INERT = ("general.", "tokenizer.", "quantize.", "split.")
# Llama 3's long context is told by its factors alone.
_LLAMA3_ROPES: list[dict[str, Any]] = [
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
]


def config_of(
    header: GgufHeader, rope_factors: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """The configuration.

    Args:
        rope_factors: the values of those tensors of `ROPE_FACTORS` that there are.

    Raises:
        GgufError: it is of another family, or says what is not known here, by its key.
    """
    metadata, path = header.metadata, header.path
    family, architecture = _family(header), str(metadata[_ARCHITECTURE])
    told = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if not key.startswith(_PREFIXES_OF_INERT)
    }
    if "ssm.inner_size" in family.keys:
        # Where only text goes in, the positions of all sections agree.
        told.pop("rope.dimension_sections", None)
        told.pop(_UNUSED_LAYERS, None)
    for key, value in told.items():
        if not isinstance(value, str | int | float):
            raise GgufError(f"{path}: {architecture}.{key}: a list is not served")
    names = {**_SIZES, **family.keys}
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.constants,
    }
    config |= {names[key]: told.pop(key) for key in list(told) if key in names}
    config.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if type(heads) is int and type(hidden) is int and heads:
        config.setdefault("head_dim", hidden // heads)
        if family.num_layers_of_narrow_queries:
            is_narrow = config.get("num_hidden_layers") == family.num_layers_of_narrow_queries
            scalar = hidden // heads if is_narrow else config["head_dim"]
            config["query_pre_attn_scalar"] = scalar
    if type(size := config.get("head_dim")) is int and size > 0 and "attention.scale" in names:
        # What files without a factor mean; transformers' default is another one.
        config.setdefault("attention_multiplier", size**-0.5)
    if "ssm.inner_size" in family.keys:
        config |= _delta_net(header, config, told)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if rope := _scaled_rope(told):
        config["rope_scaling"] = rope
        if family.model_type == "gpt_oss":
            # What the format has no place for.
            rope["truncate"] = False
    elif family.model_type == "gpt_oss":
        config["rope_scaling"] = {"rope_type": "default"}
    if _LLAMA3_FACTORS in rope_factors:
        config["rope_scaling"] = _llama3_rope(path, config, rope_factors[_LLAMA3_FACTORS])
    elif family.model_type == "phi3":
        config |= _phi3_rope(config, told, rope_factors)
    elif rope_factors:
        raise GgufError(f"{path}: {min(rope_factors)}: is not served with {architecture}")
    _check_rest(path, architecture, told, config)
    ends = set()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        token = metadata.get(key)
        if token is not None and type(token) is not int:
            raise GgufError(f"{path}: {key}: {str(token)[:40]} is no token")
        ends |= {token} - {None}
    config["eos_token_id"] = sorted(ends)
    # Some families' code has a default that smaller vocabularies lack.
    config["pad_token_id"] = None
    return config


def unused_layers(header: GgufHeader) -> range:
    """Layers that the model is computed without."""
    architecture = header.metadata.get(_ARCHITECTURE)
    count, num_layers = (
        header.metadata.get(f"{architecture}.{key}", 0) for key in (_UNUSED_LAYERS, "block_count")
    )
    if type(count) is not int or type(num_layers) is not int or not 0 <= count <= num_layers:
        raise GgufError(f"{header.path}: {architecture}.{_UNUSED_LAYERS}: {count} of {num_layers}")
    return range(num_layers - count, num_layers)


def model_type_of(header: GgufHeader) -> str:
    """The model's type in transformers.

    Raises:
        GgufError: it is not served.
    """
    return _family(header).model_type


def _family(header: GgufHeader) -> _Family:
    architecture = str(header.metadata.get(_ARCHITECTURE))
    if architecture == "llama" and header.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if architecture not in _FAMILIES:
        raise GgufError(
            f"{header.path}: {_ARCHITECTURE}: {architecture} is not served from this format"
        )
    return _FAMILIES[architecture]


def _scaled_rope(told: dict[str, Any]) -> dict[str, Any] | None:
    """What `told` says of scaled positions, and takes it out."""
    kind = told.get("rope.scaling.type")
    if kind not in ("linear", "yarn"):
        return None
    names = {"type": "rope_type", "factor": "factor", "finetuned": ""}
    if kind == "yarn":
        names |= {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
    keys = {key: f"rope.scaling.{key}" for key in names}
    rope = {names[key]: told.pop(full) for key, full in keys.items() if full in told}
    rope.pop("", None)
    return rope


def _phi3_rope(
    config: Mapping[str, Any],
    told: dict[str, Any],
    factors: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any]:
    """What `told` and `factors` say of rotary embeddings, taken out of `told`."""
    rope: dict[str, Any] = {}
    rotated, size = told.get("rope.dimension_count"), config.get("head_dim")
    if type(rotated) is int and type(size) is int and 0 < rotated < size:
        del told["rope.dimension_count"]
        rope["partial_rotary_factor"] = rotated / size
    if factors:
        if told.get("rope.scaling.type") == "longrope":
            del told["rope.scaling.type"]
        rope["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": told.pop("rope.scaling.attn_factor", 1.0),
            **{key: factors[name].tolist() for key, name in _LONGROPE_FACTORS.items()
               if name in factors},
        }  # fmt: skip
    return rope


def _check_rest(
    path: Any, architecture: str, told: dict[str, Any], config: Mapping[str, Any]
) -> None:
    """Refuses what would make another model, and is not known."""
    same = {
        "attention.value_length": config.get("head_dim"),
        "rope.dimension_count": config.get("head_dim"),
        "expert_count": 0,
        "expert_used_count": 0,
        "rope.scaling.type": "none",
    }
    for key, value in told.items():
        if key not in same or value != same[key]:
            shown = str(value)[:40]
            raise GgufError(f"{path}: {architecture}.{key}: {shown} is not served")


def _delta_net(
    header: GgufHeader, config: Mapping[str, Any], told: dict[str, Any]
) -> dict[str, Any]:
    """What a model with gated delta nets has otherwise, with what it says taken out of `told`."""
    size, count = config.get("linear_value_head_dim"), config.get("linear_num_value_heads")
    if type(size) is not int or type(count) is not int or count < 1 or size % count:
        raise GgufError(f"{header.path}: ssm.inner_size: {size} of {count} heads")
    own: dict[str, Any] = {"linear_value_head_dim": size // count}
    if unused := unused_layers(header):
        own["num_hidden_layers"] = unused.start
    rotated, head_dim = told.pop("rope.dimension_count", None), config.get("head_dim")
    if type(rotated) is int and type(head_dim) is int and head_dim > 0:
        own["partial_rotary_factor"] = rotated / head_dim
    return own


def _llama3_rope(
    path: Any, config: Mapping[str, Any], factors: np.ndarray[Any, Any]
) -> dict[str, Any]:
    dimensions, theta = config.get("head_dim"), config.get("rope_theta")
    if type(dimensions) is not int or dimensions < 2 or type(theta) is not float or theta <= 0:
        raise GgufError(f"{path}: {_LLAMA3_FACTORS}: for heads of {dimensions}, base {theta}")
    frequencies = theta ** -(np.arange(0, dimensions, 2) / dimensions)
    wavelengths = 2 * np.pi / frequencies
    for rope in _LLAMA3_ROPES:
        length, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return rope
    raise GgufError(f"{path}: {_LLAMA3_FACTORS}: these factors are of no known scaling")
