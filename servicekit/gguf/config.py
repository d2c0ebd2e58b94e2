"""A GGUF file's metadata as the config.json that transformers' models of its family have."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from servicekit.gguf.families import (
    ARCHITECTURE,
    SIZES,
    UNUSED_LAYERS,
    Family,
    family_of,
    unused_layers,
)
from servicekit.gguf.header import GgufError, GgufHeader
from servicekit.gguf.layers import told_by_layer

_LLAMA3_FACTORS = "rope_freqs.weight"
# longrope's, by their names in config.json.
_LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
ROPE_FACTORS = (_LLAMA3_FACTORS, *_LONGROPE_FACTORS.values())
"""Names of tensors that are no weights."""
_TOOL_RESPONSE = "<|tool_response>"
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
    family, architecture = family_of(header), str(metadata[ARCHITECTURE])
    told = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if not key.startswith(_PREFIXES_OF_INERT)
    }
    if "ssm.inner_size" in family.keys:
        # Where only text goes in, the positions of all sections agree.
        told.pop("rope.dimension_sections", None)
        told.pop(UNUSED_LAYERS, None)
    for key, value in told.items():
        if not isinstance(value, str | int | float) and key not in family.lists:
            raise GgufError(f"{path}: {architecture}.{key}: a list is not served")
    of_layers = told_by_layer(header, family, told, rope_factors) if family.lists else {}
    names = {**SIZES, **family.keys}
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.constants,
        **of_layers,
    }
    config |= {names[key]: told.pop(key) for key in list(told) if key in names}
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    config.setdefault("vocab_size", len(tokens))
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
    rope = _scaled_rope(told)
    if family.lists:
        config["rope_parameters"]["full_attention"] |= rope or {}
    else:
        config |= _rope(path, family, config, told, rope, rope_factors)
    _check_rest(path, architecture, told, config)
    ends = set()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        token = metadata.get(key)
        if token is not None and type(token) is not int:
            raise GgufError(f"{path}: {key}: {str(token)[:40]} is no token")
        ends |= {token} - {None}
    if family.model_type == "gemma4_text" and _TOOL_RESPONSE in tokens:
        # It ends calls: an end token of the published models, of which the format keeps but one.
        ends.add(tokens.index(_TOOL_RESPONSE))
    config["eos_token_id"] = sorted(ends)
    # Some families' code has a default that smaller vocabularies lack.
    config["pad_token_id"] = None
    return config


def _rope(
    path: Any,
    family: Family,
    config: Mapping[str, Any],
    told: dict[str, Any],
    scaled: dict[str, Any] | None,
    factors: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any]:
    """The rotary embeddings of a family that has one kind, with what says so taken out of `told`.

    Args:
        scaled: what `_scaled_rope` found.
    """
    if family.model_type == "phi3" and _LLAMA3_FACTORS not in factors:
        return ({"rope_scaling": scaled} if scaled else {}) | _phi3_rope(config, told, factors)
    if family.model_type == "gpt_oss":
        # What the format has no place for.
        scaled = {**scaled, "truncate": False} if scaled else {"rope_type": "default"}
    if _LLAMA3_FACTORS in factors:
        scaled = _llama3_rope(path, config, factors[_LLAMA3_FACTORS])
    elif factors:
        raise GgufError(f"{path}: {min(factors)}: is not served with {family.model_type}")
    return {"rope_scaling": scaled} if scaled else {}


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
            "yarn_attn_factor": "attention_factor",
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
