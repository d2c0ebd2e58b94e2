"""Reads a checkpoint's config.json into the dimensions and choices of a decoder.

What would change the computation and is not known here is refused, never guessed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verifier.checkpoint.families import (
    COMMON_DEFAULTS,
    FAMILIES,
    Family,
    Ropes,
    Windows,
)
from verifier.checkpoint.inert_keys import is_inert
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.rope import rotary
from verifier.checkpoint.text_part import text_config
from verifier.checkpoint.weight_types import LANES, Activation, Rotary, WeightType

DTYPES = {
    "float32": WeightType.FLOAT32,
    "bfloat16": WeightType.BFLOAT16,
    "float16": WeightType.FLOAT16,
}
# No known model has a tenth of it. Without a bound, a short file would claim all memory.
_MAX_LAYERS = 1000
_MAX_EXPERTS = 1000
_LARGEST_NUMBER = (1 << 31) - 1
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. `sliding_window` and `rotary` as in `verifier.cpu.weights.Layer`."""

    sliding_window: int
    rotary: int
    has_experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's dimensions and choices; what is not explained is named as in DecoderWeights.

    Attributes:
        intermediate_size: of a dense MLP.
        num_experts, expert_size, num_experts_per_token: 0 without experts.
        dtype: that the checkpoint says it is of; None: it doesn't say.
        eos_token_ids: end tokens of the generation configuration if there is one, else of the
            model's.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    attention_scaling: float
    attention_softcap: float
    logits_softcap: float
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    activation: Activation
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    ties_embeddings: bool
    rotaries: list[Rotary]
    layers: list[LayerConfig]
    num_experts: int
    expert_size: int
    num_experts_per_token: int
    normalises_experts: bool
    dtype: WeightType | None
    eos_token_ids: frozenset[int]

    @property
    def architecture(self) -> str:
        return self.family.architecture

    @property
    def max_short_tokens(self) -> int | None:
        """As in `Rotary`, if a sequence's limit decides its rotary embedding."""
        return next(
            (r.max_short_tokens for r in self.rotaries if r.long_inv_freq is not None), None
        )


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        CheckpointError: they are missing or no JSON.
        NotServedError: the decoder does not compute this model, or may not.
    """
    content = dict(text_config(_read_object(folder / "config.json")))
    model_type = str(content.get("model_type"))
    if model_type not in FAMILIES:
        raise NotServedError(f"models of type {model_type}")
    family = FAMILIES[model_type]
    architectures = content.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise NotServedError(f"architectures {architectures}")
    try:
        config = _Config(family, content)
        return _describe(config, _eos_token_ids(config, folder))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise NotServedError(f"its config.json has an odd value: {error}") from error


class _Config:
    """The values of a config.json, with defaults."""

    def __init__(self, family: Family, content: dict[str, Any]) -> None:
        """Raises: NotServedError: for keys that are not known and not off."""
        self.family = family
        for alias, key in family.aliases.items():
            if alias in content and content.setdefault(key, content[alias]) != content.pop(alias):
                raise NotServedError(f"its config.json tells {alias} and {key} apart")
        self.values = {**COMMON_DEFAULTS, **family.defaults, **content}
        known = {*COMMON_DEFAULTS, *family.defaults, *_SIZES, *_ROPE_KEYS}
        # `quantization_config` reads it.
        known.add("quantization_config")
        if unknown := sorted(
            key for key, value in content.items() if key not in known and not is_inert(key, value)
        ):
            raise NotServedError(f"its config.json has {', '.join(unknown)}")

    def number(self, key: str) -> int:
        """Raises: NotServedError: it is missing or no positive whole number."""
        value = self.values.get(key)
        if type(value) is not int or not 0 < value <= _LARGEST_NUMBER:
            raise NotServedError(f"its config.json has {key} {value}")
        return value

    def factor(self, key: str) -> float:
        """A factor of a family that has multipliers, of another 1.

        Raises:
            NotServedError: it is not positive.
        """
        factor = float(self.values[key]) if self.family.has_multipliers else 1.0
        if not 0.0 < factor < math.inf:
            raise NotServedError(f"its config.json has {key} {factor}")
        return factor

    def norm_eps(self) -> float:
        """Raises: NotServedError: it is not positive as a float32: norms of zeros would fail."""
        eps = float(self.values["rms_norm_eps"])
        if not 0.0 < float(np.float32(eps)) < math.inf:
            raise NotServedError(f"its config.json has rms_norm_eps {eps}")
        return eps

    def flag(self, key: bool | str) -> bool:
        return key if isinstance(key, bool) else bool(self.values[key])

    def layer_types(self) -> list[str]:
        """What each layer attends to."""
        num_layers = self.number("num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise CheckpointError(f"num_hidden_layers is {num_layers}, over {_MAX_LAYERS}")
        window = self.values.get("sliding_window")
        # Other families' code does not read it.
        if "use_sliding_window" in self.family.defaults and not self.values["use_sliding_window"]:
            window = None
        windows = self.family.windows
        named = self.values.get("layer_types")
        if named is not None:
            if len(named) != num_layers or not set(named) <= {_FULL, _SLIDING}:
                raise NotServedError(f"layers of types {named}")
            if _SLIDING in named and window is None:
                raise NotServedError("sliding layers without sliding_window")
            return list(named)
        if window is None or windows is Windows.NONE:
            return [_FULL] * num_layers
        if windows is Windows.NAMED:
            raise NotServedError("sliding_window without layer_types")
        if windows is Windows.EVERY_LAYER:
            return [_SLIDING] * num_layers
        if windows is Windows.LAST_LAYERS:
            first = self.values["max_window_layers"]
            return [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
        pattern = self.number("sliding_window_pattern")
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]


def _describe(config: _Config, eos_token_ids: frozenset[int]) -> ModelConfig:
    family, values = config.family, config.values
    hidden_size, num_heads = config.number("hidden_size"), config.number("num_attention_heads")
    head_dim = config.number("head_dim") if values["head_dim"] else hidden_size // num_heads
    num_kv_heads = num_heads
    if values["num_key_value_heads"] is not None:
        num_kv_heads = config.number("num_key_value_heads")
    for name, size in (("hidden_size", hidden_size), ("head_dim", head_dim)):
        if size % LANES:
            raise NotServedError(f"{name} {size} is no multiple of {LANES}")
    if num_heads % num_kv_heads:
        raise NotServedError(f"{num_heads} heads share {num_kv_heads} key heads")
    if values[family.activation_key] not in _ACTIVATIONS:
        raise NotServedError(f"activation {values[family.activation_key]}")
    if values.get("use_bidirectional_attention"):
        raise NotServedError("attention to later tokens")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.get(key) is not None and not values[key] > 0:
            raise NotServedError(f"its config.json has {key} {values[key]}")
    if family.clamps_gates:
        for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if values[key] != value:
                raise NotServedError(f"its config.json has {key} {values[key]}")
    softcap = values.get("attn_logit_softcapping")
    if softcap and not family.has_attention_softcap:
        raise NotServedError("attn_logit_softcapping, which this family's attention ignores")
    scalar = config.number(family.scalar_key) if family.scalar_key else head_dim
    layer_types = config.layer_types()
    rotaries, rotary_of = _rotaries(config, layer_types, head_dim)
    rotary_of_layers = [rotary_of[kind] for kind in layer_types]
    if unrotated := _unrotated_layers(config, len(layer_types)):
        # Angles of zero rotate nothing, to the bit.
        rotaries.append(Rotary(inv_freq=np.zeros_like(rotaries[0].inv_freq)))
        for layer in unrotated:
            rotary_of_layers[layer] = len(rotaries) - 1
    sparse = _sparse_layers(config, len(layer_types))
    experts = family.experts if any(sparse) else None
    num_experts = config.number(experts.count_key) if experts else 0
    if num_experts > _MAX_EXPERTS:
        raise CheckpointError(f"{experts and experts.count_key} is over {_MAX_EXPERTS}")
    num_experts_per_token = config.number("num_experts_per_tok") if experts else 0
    if num_experts_per_token > num_experts:
        raise NotServedError(f"{num_experts_per_token} of {num_experts} experts per token")
    normalises_key = experts.normalises_key if experts else None
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=config.number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.number("vocab_size"),
        max_position_embeddings=config.number("max_position_embeddings"),
        norm_eps=config.norm_eps(),
        attention_scaling=(
            config.factor("attention_multiplier") if family.has_multipliers else scalar**-0.5
        ),
        attention_softcap=float(softcap or 0.0),
        logits_softcap=float(values.get("final_logit_softcapping") or 0.0),
        embedding_scale=(
            math.sqrt(hidden_size)
            if family.scales_embeddings
            else config.factor("embedding_multiplier")
        ),
        residual_scale=config.factor("residual_multiplier"),
        logits_scale=1.0 / config.factor("logits_scaling"),
        activation=(
            Activation.CLAMPED
            if family.clamps_gates
            else _ACTIVATIONS[values[family.activation_key]]
        ),
        has_qkv_bias=config.flag(family.qkv_bias),
        has_output_bias=config.flag(family.output_bias),
        has_mlp_bias=config.flag(family.mlp_bias),
        ties_embeddings=bool(values["tie_word_embeddings"]),
        rotaries=rotaries,
        layers=[
            LayerConfig(
                sliding_window=config.number("sliding_window") if kind == _SLIDING else 0,
                rotary=rotary,
                has_experts=is_sparse,
            )
            for kind, rotary, is_sparse in zip(layer_types, rotary_of_layers, sparse, strict=True)
        ],
        num_experts=num_experts,
        expert_size=config.number(experts.width_key) if experts else 0,
        num_experts_per_token=num_experts_per_token,
        normalises_experts=normalises_key is None or bool(values[normalises_key]),
        dtype=DTYPES.get(str(values.get("dtype") or values.get("torch_dtype"))),
        eos_token_ids=eos_token_ids,
    )


def _sparse_layers(config: _Config, num_layers: int) -> list[bool]:
    """Which layers are mixtures of experts."""
    if config.family.experts is None or not config.values[config.family.experts.count_key]:
        return [False] * num_layers
    step = config.values.get("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or ()
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _unrotated_layers(config: _Config, num_layers: int) -> list[int]:
    """Which layers have no rotary embedding."""
    if not config.family.skips_ropes:
        return []
    has_rope = config.values["no_rope_layers"]
    if has_rope is None:
        interval = config.number("no_rope_layer_interval")
        has_rope = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    # type(): a JSON true is an int to isinstance.
    if len(has_rope) != num_layers or any(type(each) is not int for each in has_rope):
        raise NotServedError(f"its config.json has no_rope_layers {has_rope}")
    return [layer for layer in range(num_layers) if not has_rope[layer]]


def _rotaries(
    config: _Config, layer_types: list[str], head_dim: int
) -> tuple[list[Rotary], dict[str, int]]:
    """The rotary embeddings, and the index of each layer type's."""
    family, values = config.family, config.values

    def make(parameters: Mapping[str, Any], theta: float) -> Rotary:
        complete = {"rope_theta": theta, **parameters}
        factor = complete.get("partial_rotary_factor")
        if family.ropes is not Ropes.PARTIAL and factor not in (None, 1):
            raise NotServedError(f"rotary embeddings of a part of the head, {factor}")
        kind = complete.get("rope_type", complete.get("type", "default"))
        if family.ropes is Ropes.PARTIAL:
            if kind not in ("default", "longrope", "su"):
                raise NotServedError(f"rotary embeddings of type {kind}")
            if kind != "default":
                # What stands beside the other parameters is not heeded.
                key = "original_max_position_embeddings"
                complete[key] = values[key]
        elif kind in ("longrope", "su"):
            raise NotServedError(f"rotary embeddings of type {kind}")
        return rotary(
            complete,
            head_dim=head_dim,
            max_position_embeddings=config.number("max_position_embeddings"),
        )

    theta = values.get("rope_theta", family.default_theta)
    if family.ropes is not Ropes.PER_LAYER_TYPE:
        parameters = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
        if family.ropes is Ropes.PARTIAL:
            parameters.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        return [make(parameters, theta)], {_FULL: 0, _SLIDING: 0}
    by_type = values.get("rope_parameters") or {}
    if not by_type.keys() <= {_FULL, _SLIDING}:
        raise NotServedError("rotary embeddings that are not told by layer type")
    full = {**(by_type.get(_FULL) or {}), **(values.get("rope_scaling") or {})}
    sliding = by_type.get(_SLIDING) or {}
    # transformers gives `rope_theta` to full layers alone.
    local_theta = values.get("rope_local_base_freq", family.default_theta)
    made = {_FULL: make(full, theta), _SLIDING: make(sliding, local_theta)}
    used = sorted(set(layer_types))
    return [made[kind] for kind in used], {kind: used.index(kind) for kind in used}


def _eos_token_ids(config: _Config, folder: Path) -> frozenset[int]:
    value = config.values["eos_token_id"]
    if (folder / "generation_config.json").exists():
        told = _read_object(folder / "generation_config.json").get("eos_token_id")
        value = value if told is None else told
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in ids):
        raise NotServedError(f"end tokens {value}")
    # Beyond the vocabulary they may be; they must fit into the answers that tell them.
    if not all(0 <= each < 1 << 32 for each in ids):
        raise CheckpointError(f"{folder}: end tokens {str(value)[:100]}: not ids of tokens")
    return frozenset(ids)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return content
