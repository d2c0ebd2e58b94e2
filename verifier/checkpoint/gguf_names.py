"""A GGUF file's tensors by the names that transformers' checkpoints have."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from servicekit.gguf.config import ROPE_FACTORS
from servicekit.gguf.families import model_type_of, unused_layers
from servicekit.gguf.header import GgufError, GgufHeader, GgufTensor
from verifier.checkpoint.stored_tensor import StoredTensor

_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    # Of Gemma 4.
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_OF_LAYERS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Where a model type has other names.
_OF_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_GEMMA4 = {
    **_OF_GEMMA,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
}
_OF_OLMO = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Factors, of no module of their own.
_OF_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
_OF_GEMMA4S_EXPERTS = {
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
}
_OF_DELTA_NETS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Of no module.
_OF_NO_MODULE = re.compile(r"blk\.(\d{1,5})\.(ssm_a|ssm_dt\.bias)")
_OF_MODEL_TYPES: Mapping[str, Mapping[str, str]] = {
    "gemma2": _OF_GEMMA,
    "gemma3_text": _OF_GEMMA,
    "gemma4_text": _OF_GEMMA4,
    **dict.fromkeys(_DELTA_NETS, _OF_DELTA_NETS),
    "olmo2": _OF_OLMO,
    "olmo3": _OF_OLMO,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gpt_oss": {
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
    },
}
# Of all experts in one, [experts, outputs, inputs].
_OF_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OF_MIXTRALS_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_EXPERTS_OF: Mapping[str, Mapping[str, str]] = {
    "mixtral": _OF_MIXTRALS_EXPERTS,
    "gemma4_text": _OF_GEMMA4S_EXPERTS,
}
# What the weights of norms are more than those of transformers' checkpoints.
_NORM_OFFSETS = dict.fromkeys(("gemma2", "gemma3_text", *_DELTA_NETS), 1.0)
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias|scale)")
# Parts of a layer that are no module's.
_OF_NO_MODULES_WEIGHT = ("attn_sinks", "layer_output_scale", "ffn_gate_up_exps")
# Whose head counts tell how rows of queries and keys are paired.
_PAIRED_ARCHITECTURES = ("llama", "granite", "smollm3")
_PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def stored_as(header: GgufHeader) -> dict[str, StoredTensor]:
    """The tensors by their names in transformers' checkpoints.

    Raises:
        GgufError: one has no known use.
    """
    model_type = model_type_of(header)
    unused = tuple(f"blk.{layer}." for layer in unused_layers(header))
    return {
        each.name: each
        for tensor in header.tensors.values()
        if tensor.name not in ROPE_FACTORS and not tensor.name.startswith(unused)
        for each in _stored(header, model_type, tensor)
    }


def _stored(header: GgufHeader, model_type: str, tensor: GgufTensor) -> Iterator[StoredTensor]:
    base, _, suffix = tensor.name.rpartition(".")
    whole = StoredTensor(
        name=f"{_NAMES.get(base)}.{suffix}", dtype=tensor.dtype, shape=tensor.shape,
        start=tensor.start, end=tensor.end, file=header.path,
        offset=_NORM_OFFSETS.get(model_type, 0.0) if _is_offset_norm(base) else 0.0,
    )  # fmt: skip
    if whole.offset and tensor.dtype != "F32":
        raise GgufError(f"{header.path}: {tensor.name}: is stored as {tensor.dtype}")
    if base in _NAMES and suffix == "weight":
        yield whole
        return
    if model_type in _DELTA_NETS and (own := _of_delta_net(whole, tensor.name)) is not None:
        yield own
        return
    match = _LAYER.fullmatch(tensor.name)
    prefix = f"model.layers.{match[1]}." if match else ""
    part = match[2] if match else ""
    of_layers = {**_OF_LAYERS, **_OF_MODEL_TYPES.get(model_type, {})}
    of_experts = _EXPERTS_OF.get(model_type, _OF_EXPERTS)
    if suffix == "scale":
        if model_type != "gemma4_text" or part not in _OF_SCALES:
            raise GgufError(f"{header.path}: {tensor.name}: has no known use")
        yield dataclasses.replace(whole, name=f"{prefix}{_OF_SCALES[part]}")
    elif part in of_layers:
        heads = _paired_heads(header, part, tensor)
        name = f"{prefix}{of_layers[part]}.{suffix}"
        name = name.removesuffix(".weight") if part in _OF_NO_MODULES_WEIGHT else name
        yield dataclasses.replace(whole, name=name, num_paired_heads=heads)
    elif part in of_experts and len(tensor.shape) == (2 if suffix == "bias" else 3):
        yield from _of_experts(whole, f"{prefix}{of_experts[part]}.{suffix}")
    else:
        raise GgufError(f"{header.path}: {tensor.name}: has no known use")


def _of_experts(tensor: StoredTensor, name: str) -> Iterator[StoredTensor]:
    """Each expert's part of a tensor of all of them; its name has its number in place of {}."""
    size = (tensor.end - tensor.start) // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        start = tensor.start + expert * size
        yield dataclasses.replace(
            tensor,
            name=name.format(expert),
            shape=tensor.shape[1:],
            start=start,
            end=start + size,
        )


def _is_offset_norm(base: str) -> bool:
    return base.endswith("_norm") and not base.endswith(".ssm_norm")


def _of_delta_net(whole: StoredTensor, name: str) -> StoredTensor | None:
    """A tensor of a gated delta net that has another name or shape; None: it is none."""
    if match := _OF_NO_MODULE.fullmatch(name):
        is_decay = match[2] == "ssm_a"
        own = f"model.layers.{match[1]}.linear_attn.{'A_log' if is_decay else 'dt_bias'}"
        return dataclasses.replace(whole, name=own, is_negative_exponential=is_decay)
    match, shape = _LAYER.fullmatch(name), whole.shape
    if match and match[2] == "ssm_conv1d" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif match and match[2] == "ffn_gate_inp_shexp" and len(shape) == 1:
        shape = (1, *shape)
    else:
        return None
    own = f"model.layers.{match[1]}.{_OF_DELTA_NETS[match[2]]}.weight"
    return dataclasses.replace(whole, name=own, shape=shape)


def _paired_heads(header: GgufHeader, part: str, tensor: GgufTensor) -> int:
    architecture = header.metadata.get("general.architecture")
    if part not in _PAIRED or architecture not in _PAIRED_ARCHITECTURES:
        return 0
    key = f"{architecture}.{_PAIRED[part]}"
    heads = header.metadata.get(key, header.metadata.get(f"{architecture}.attention.head_count"))
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise GgufError(f"{header.path}: {tensor.name}: {tensor.shape[0]} rows of {heads} heads")
    return heads
