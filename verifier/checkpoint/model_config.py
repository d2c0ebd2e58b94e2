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

from verifier.checkpoint.config_values import DELTA, FULL, SLIDING, ConfigValues
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.families import FAMILIES
from verifier.checkpoint.family import Family, Ropes
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.rope import rotary
from verifier.checkpoint.text_part import text_config
from verifier.checkpoint.weight_types import LANES, Activation, Rotary, WeightType

DTYPES = {
    "float32": WeightType.FLOAT32,
    "bfloat16": WeightType.BFLOAT16,
    "float16": WeightType.FLOAT16,
}
# No known model has as many. Without a bound, a short file would claim all memory.
_MAX_EXPERTS = 1000
_MAX_KERNEL_SIZE = 64
_PER_LAYER_VOCAB = "vocab_size_per_layer_input"
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer. `sliding_window` and `rotary` as in `verifier.cpu.weights.Layer`."""

    sliding_window: int
    rotary: int
    has_experts: bool
    # Of attention.
    num_kv_heads: int
    head_dim: int
    # Whether values are the projections of keys, before norm and rotation.
    has_keys_as_values: bool
    # The layer whose keys and values it attends to; None: its own.
    kv_layer: int | None
    # Of a dense MLP.
    intermediate_size: int
    # Whether it is a gated delta net, without attention.
    is_delta: bool

    @property
    def has_kv(self) -> bool:
        """Whether it keeps keys and values."""
        return not self.is_delta and self.kv_layer is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's dimensions and choices; what is not explained is named as in DecoderWeights.

    Attributes:
        per_layer_input_size: of a token's input of each layer; 0: there are none.
        per_layer_vocab_size: tokens that have some.
        num_experts, expert_size, num_experts_per_token: 0 without experts.
        shared_expert_size: of the expert of all tokens; 0: there is none.
        delta: of the layers that are gated delta nets; None: there are none.
        dtype: that the checkpoint says it is of; None: it doesn't say.
        eos_token_ids: end tokens of the generation configuration if there is one, else of the
            model's.
    """

    family: Family
    hidden_size: int
    per_layer_input_size: int
    per_layer_vocab_size: int
    num_heads: int
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
    shared_expert_size: int
    delta: DeltaShape | None
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
        config = ConfigValues(family, content)
        return _describe(config, _eos_token_ids(config, folder))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise NotServedError(f"its config.json has an odd value: {error}") from error


def _describe(config: ConfigValues, eos_token_ids: frozenset[int]) -> ModelConfig:
    family, values = config.family, config.values
    hidden_size, num_heads = config.number("hidden_size"), config.number("num_attention_heads")
    if hidden_size % LANES:
        raise NotServedError(f"hidden_size {hidden_size} is no multiple of {LANES}")
    if values[family.activation_key] not in _ACTIVATIONS:
        raise NotServedError(f"activation {values[family.activation_key]}")
    ahead = values.get("use_bidirectional_attention")
    if ahead and not (family.reads_media_ahead and ahead == "vision"):
        raise NotServedError("attention to later tokens")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.get(key) is not None and not values[key] > 0:
            raise NotServedError(f"its config.json has {key} {values[key]}")
    softcap = values.get("attn_logit_softcapping")
    if softcap and not family.has_attention_softcap:
        raise NotServedError("attn_logit_softcapping, which this family's attention ignores")
    layer_types = config.layer_types()
    heads = config.heads(layer_types)
    head_dims = {kind: own.head_dim for kind, own in zip(layer_types, heads, strict=True)}
    if any(own.head_dim != head_dims[kind] for kind, own in zip(layer_types, heads, strict=True)):
        raise NotServedError("layers of one type whose heads have different sizes")
    rotaries, rotary_of = _rotaries(config, head_dims)
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
    per_layer_input_size = values.get("hidden_size_per_layer_input") or 0
    if per_layer_input_size:
        per_layer_input_size = config.number("hidden_size_per_layer_input")
        if per_layer_input_size % LANES or config.number(_PER_LAYER_VOCAB) < values["vocab_size"]:
            raise NotServedError(
                f"inputs of {per_layer_input_size} numbers for each layer, of "
                f"{values[_PER_LAYER_VOCAB]} tokens"
            )
    normalises_key = experts.normalises_key if experts else None
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        per_layer_input_size=per_layer_input_size,
        per_layer_vocab_size=config.number(_PER_LAYER_VOCAB) if per_layer_input_size else 0,
        num_heads=num_heads,
        vocab_size=config.number("vocab_size"),
        max_position_embeddings=config.number("max_position_embeddings"),
        norm_eps=config.norm_eps(),
        attention_scaling=_attention_scaling(config, heads[0].head_dim),
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
                sliding_window=config.number("sliding_window") if kind == SLIDING else 0,
                rotary=rotary,
                has_experts=is_sparse,
                num_kv_heads=own.num_kv_heads,
                head_dim=own.head_dim,
                has_keys_as_values=(
                    family.has_full_heads and kind == FULL and bool(values["attention_k_eq_v"])
                ),
                kv_layer=kv_layer,
                intermediate_size=config.number("intermediate_size")
                * (2 if kv_layer is not None and values.get("use_double_wide_mlp") else 1),
                is_delta=kind == DELTA,
            )
            for kind, rotary, is_sparse, own, kv_layer in zip(
                layer_types,
                rotary_of_layers,
                sparse,
                heads,
                config.kv_layers(layer_types),
                strict=True,
            )
        ],
        num_experts=num_experts,
        expert_size=config.number(experts.width_key) if experts else 0,
        num_experts_per_token=num_experts_per_token,
        normalises_experts=normalises_key is None or bool(values[normalises_key]),
        shared_expert_size=(
            config.number(experts.shared_width_key) if experts and experts.shared else 0
        ),
        delta=_delta(config) if DELTA in layer_types else None,
        dtype=DTYPES.get(str(values.get("dtype") or values.get("torch_dtype"))),
        eos_token_ids=eos_token_ids,
    )


def _attention_scaling(config: ConfigValues, head_dim: int) -> float:
    family = config.family
    if family.attention_scaling is not None:
        return family.attention_scaling
    if family.has_multipliers:
        return config.factor("attention_multiplier")
    return float((config.number(family.scalar_key) if family.scalar_key else head_dim) ** -0.5)


def _delta(config: ConfigValues) -> DeltaShape:
    shape = DeltaShape(
        num_key_heads=config.number("linear_num_key_heads"),
        num_value_heads=config.number("linear_num_value_heads"),
        key_dim=config.number("linear_key_head_dim"),
        value_dim=config.number("linear_value_head_dim"),
        kernel_size=config.number("linear_conv_kernel_dim"),
    )
    sizes = (("key", shape.key_dim, LANES), ("value", shape.value_dim, 2 * LANES))
    for name, size, unit in sizes:
        if size % unit:
            raise NotServedError(f"linear_{name}_head_dim {size} is no multiple of {unit}")
    if shape.num_value_heads % shape.num_key_heads:
        raise NotServedError(
            f"{shape.num_value_heads} value heads share {shape.num_key_heads} key heads"
        )
    if shape.kernel_size > _MAX_KERNEL_SIZE:
        raise CheckpointError(f"linear_conv_kernel_dim is {shape.kernel_size}, over "
                              f"{_MAX_KERNEL_SIZE}")  # fmt: skip
    return shape


def _sparse_layers(config: ConfigValues, num_layers: int) -> list[bool]:
    """Which layers are mixtures of experts."""
    experts = config.family.experts
    is_sparse = config.values.get("enable_moe_block", True)
    if experts is None or not is_sparse or not config.values[experts.count_key]:
        return [False] * num_layers
    step = config.values.get("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or ()
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _unrotated_layers(config: ConfigValues, num_layers: int) -> list[int]:
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
    config: ConfigValues, head_dims: Mapping[str, int]
) -> tuple[list[Rotary], dict[str, int]]:
    """The rotary embeddings, and the index of each layer type's.

    Args:
        head_dims: by the types of layers that there are.
    """
    family, values = config.family, config.values
    is_partial = family.ropes in (Ropes.PARTIAL, Ropes.PARTIAL_OR_LONG)

    def make(parameters: Mapping[str, Any], theta: float, head_dim: int) -> Rotary:
        complete = {"rope_theta": theta, **parameters}
        factor = complete.get("partial_rotary_factor")
        kind = complete.get("rope_type", complete.get("type", "default"))
        if not is_partial and factor not in (None, 1) and kind != "proportional":
            raise NotServedError(f"rotary embeddings of a part of the head, {factor}")
        if family.ropes is Ropes.PARTIAL_OR_LONG:
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
        if is_partial:
            parameters.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        [head_dim] = set(head_dims.values())
        return [make(parameters, theta, head_dim)], dict.fromkeys((FULL, SLIDING, DELTA), 0)
    by_type = values.get("rope_parameters") or {}
    if not by_type.keys() <= {FULL, SLIDING}:
        raise NotServedError("rotary embeddings that are not told by layer type")
    full = {**(by_type.get(FULL) or {}), **(values.get("rope_scaling") or {})}
    sliding = by_type.get(SLIDING) or {}
    # transformers gives `rope_theta` to full layers alone.
    local_theta = values.get("rope_local_base_freq", family.default_theta)
    told = {FULL: (full, theta), SLIDING: (sliding, local_theta)}
    used = sorted(head_dims)
    rotaries = [make(*told[kind], head_dims[kind]) for kind in used]
    return rotaries, {kind: used.index(kind) for kind in used}


def _eos_token_ids(config: ConfigValues, folder: Path) -> frozenset[int]:
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
