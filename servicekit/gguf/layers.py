"""What a GGUF file says of sliding and full layers, as a config.json of their families does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from servicekit.gguf.families import Family
from servicekit.gguf.header import GgufError, GgufHeader

# Of Gemma 4's full layers: 1 for pairs of a head that are rotated, for others so much that no
# position rotates them.
_FULL_FACTORS = "rope_freqs.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = "attention.sliding_window_pattern"
_MOST_LAYERS = 10_000
_LEAST_OF_NONE = 1e20


def told_by_layer(
    header: GgufHeader,
    family: Family,
    told: dict[str, Any],
    rope_factors: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any]:
    """Entries of config.json, with what they come from taken out of `told`, or made one number.

    Args:
        told: the metadata by their keys behind the architecture.
        rope_factors: values of tensors.

    Raises:
        GgufError: it is not what such a model can be, by its key.
    """
    kinds = _layer_types(header.path, told)
    theta = told.pop("rope.freq_base", None)
    own_theta = told.pop("rope.freq_base_swa", theta)
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    config: dict[str, Any] = {
        "layer_types": kinds,
        "rope_parameters": {
            _FULL: full,
            _SLIDING: {"rope_type": "default", "rope_theta": own_theta},
        },
    }
    if family.model_type == "gemma4_text":
        config |= _gemma4(header, told, kinds)
        full |= _proportional(header.path, told, rope_factors)
    elif rope_factors:
        raise GgufError(f"{header.path}: {min(rope_factors)}: is not served with such layers")
    return config


def _layer_types(path: Path, told: dict[str, Any]) -> list[str]:
    num_layers = told.get("block_count")
    if type(num_layers) is not int or not 0 < num_layers < _MOST_LAYERS:
        raise GgufError(f"{path}: block_count: {num_layers} layers")
    slides = told.pop(_PATTERN, 4)
    if type(slides) is int and slides > 0:
        return [_SLIDING if (layer + 1) % slides else _FULL for layer in range(num_layers)]
    if not isinstance(slides, np.ndarray) or slides.dtype != np.bool_ or len(slides) != num_layers:
        raise GgufError(f"{path}: {_PATTERN}: does not say of {num_layers} layers which slide")
    return [_SLIDING if each else _FULL for each in slides.tolist()]


def _gemma4(header: GgufHeader, told: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    path = header.path
    for key, same in (
        ("attention.value_length", "attention.key_length"),
        ("attention.value_length_swa", "attention.key_length_swa"),
        ("rope.dimension_count", "attention.key_length"),
        ("rope.dimension_count_swa", "attention.key_length_swa"),
    ):
        if (size := told.pop(key, told.get(same))) != told.get(same):
            raise GgufError(f"{path}: {key}: {size} is not {same}")
    num_shared = told.setdefault("attention.shared_kv_layers", 0)
    if type(num_shared) is not int or not 0 <= num_shared < len(kinds):
        raise GgufError(f"{path}: attention.shared_kv_layers: {num_shared} of {len(kinds)} layers")
    num_own = len(kinds) - num_shared
    own_full = [layer for layer in range(num_own) if kinds[layer] == _FULL]
    config: dict[str, Any] = {
        "attention_k_eq_v": not any(
            f"blk.{layer}.attn_v.weight" in header.tensors for layer in own_full
        ),
    }
    widths = _numbers(path, told, "feed_forward_length", len(kinds))
    own, shared = set(widths[:num_own]), set(widths[num_own:])
    config["use_double_wide_mlp"] = bool(shared) and shared != own
    if len(own) > 1 or (config["use_double_wide_mlp"] and shared != {2 * each for each in own}):
        raise GgufError(f"{path}: feed_forward_length: MLPs of several sizes")
    told["feed_forward_length"] = widths[0]
    counts = _numbers(path, told, "attention.head_count_kv", len(kinds))
    by_kind = {
        kind: {count for own, count in zip(kinds, counts, strict=True) if own == kind}
        for kind in (_SLIDING, _FULL)
    }
    if any(len(each) > 1 for each in by_kind.values()):
        raise GgufError(f"{path}: attention.head_count_kv: layers of one type differ")
    usual = (by_kind[_SLIDING] or by_kind[_FULL]).pop()
    told["attention.head_count_kv"] = usual
    of_full = by_kind[_FULL].pop() if by_kind[_FULL] else usual
    if of_full != usual:
        if not config["attention_k_eq_v"]:
            raise GgufError(f"{path}: attention.head_count_kv: {of_full} heads with values")
        config["num_global_key_value_heads"] = of_full
    if told.get("expert_count"):
        config["enable_moe_block"] = True
    else:
        for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            told.pop(key, None)
    if told.get("embedding_length_per_layer_input"):
        embeddings = header.tensors.get("per_layer_token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise GgufError(f"{path}: per_layer_token_embd.weight: is missing, or no matrix")
        config["vocab_size_per_layer_input"] = embeddings.shape[0]
    return config


def _proportional(
    path: Path, told: Mapping[str, Any], rope_factors: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """Of how much of a head the full layers rotate."""
    factors, size = rope_factors.get(_FULL_FACTORS), told.get("attention.key_length")
    if factors is None or type(size) is not int or size < 2 or factors.shape != (size // 2,):
        raise GgufError(f"{path}: {_FULL_FACTORS}: is missing, or not of heads of {size}")
    num_rotated = int(np.count_nonzero(factors == 1.0))
    if not (
        np.all(factors[:num_rotated] == 1.0) and np.all(factors[num_rotated:] > _LEAST_OF_NONE)
    ):
        raise GgufError(f"{path}: {_FULL_FACTORS}: rotates other pairs than a head's first")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * num_rotated / size}


def _numbers(path: Path, told: Mapping[str, Any], key: str, num_layers: int) -> list[int]:
    """What a key says of each layer, by a number or a list."""
    value = told.get(key)
    if type(value) is int:
        return [value] * num_layers
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind not in "iu"
        or len(value) != num_layers
    ):
        raise GgufError(f"{path}: {key}: is no number, and no list of {num_layers}")
    return [int(each) for each in value.tolist()]
