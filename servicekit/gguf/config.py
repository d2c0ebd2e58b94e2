"""A GGUF file's metadata as the config.json that transformers' models of its family have."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from servicekit.gguf.header import GgufError, GgufHeader

ROPE_FACTORS = "rope_freqs.weight"
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
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
    },
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
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


def config_of(header: GgufHeader, rope_factors: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    """The configuration.

    Args:
        rope_factors: the values of the tensor `ROPE_FACTORS`, if there is one.

    Raises:
        GgufError: it is of another family, or says what is not known here, by its key.
    """
    metadata, path = header.metadata, header.path
    architecture = str(metadata.get(_ARCHITECTURE))
    if architecture not in _FAMILIES:
        raise GgufError(f"{path}: {_ARCHITECTURE}: {architecture} is not served from this format")
    told = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if not key.startswith(_PREFIXES_OF_INERT)
    }
    for key, value in told.items():
        if not isinstance(value, str | int | float):
            raise GgufError(f"{path}: {architecture}.{key}: a list is not served")
    names = {**_SIZES, **(_EXPERTS if architecture == "qwen3moe" else {})}
    config = {**_FAMILIES[architecture], "dtype": "float16", "hidden_act": "silu"}
    config |= {names[key]: told.pop(key) for key in list(told) if key in names}
    config.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if "head_dim" not in config and type(heads) is int and type(hidden) is int and heads:
        config["head_dim"] = hidden // heads
    _check_rest(path, architecture, told, config)
    if rope_factors is not None:
        config["rope_scaling"] = _llama3_rope(path, config, rope_factors)
    ends = set()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        token = metadata.get(key)
        if token is not None and type(token) is not int:
            raise GgufError(f"{path}: {key}: {str(token)[:40]} is no token")
        ends |= {token} - {None}
    config["eos_token_id"] = sorted(ends)
    return config


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


def _llama3_rope(
    path: Any, config: Mapping[str, Any], factors: np.ndarray[Any, Any]
) -> dict[str, Any]:
    dimensions, theta = config.get("head_dim"), config.get("rope_theta")
    if type(dimensions) is not int or dimensions < 2 or type(theta) is not float or theta <= 0:
        raise GgufError(f"{path}: {ROPE_FACTORS}: for heads of {dimensions}, base {theta}")
    frequencies = theta ** -(np.arange(0, dimensions, 2) / dimensions)
    wavelengths = 2 * np.pi / frequencies
    for rope in _LLAMA3_ROPES:
        length, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return rope
    raise GgufError(f"{path}: {ROPE_FACTORS}: these factors are of no known scaling")
