"""A GGUF file's tensors by the names that transformers' checkpoints have."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from servicekit.gguf.config import ROPE_FACTORS, model_type_of
from servicekit.gguf.header import GgufError, GgufHeader, GgufTensor
from verifier.checkpoint.stored_tensor import StoredTensor

_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_OF_MODEL_TYPES: Mapping[str, Mapping[str, str]] = {
    "gemma2": _OF_GEMMA,
    "gemma3_text": _OF_GEMMA,
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
# What the weights of norms are more than those of transformers' checkpoints.
_NORM_OFFSETS = {"gemma2": 1.0, "gemma3_text": 1.0}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
# Whose head counts tell how rows of queries and keys are paired.
_PAIRED_ARCHITECTURES = ("llama",)
_PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def stored_as(header: GgufHeader) -> dict[str, StoredTensor]:
    """The tensors by their names in transformers' checkpoints.

    Raises:
        GgufError: one has no known use.
    """
    model_type = model_type_of(header)
    return {
        each.name: each
        for tensor in header.tensors.values()
        if tensor.name not in ROPE_FACTORS
        for each in _stored(header, model_type, tensor)
    }


def _stored(header: GgufHeader, model_type: str, tensor: GgufTensor) -> Iterator[StoredTensor]:
    base, _, suffix = tensor.name.rpartition(".")
    whole = StoredTensor(
        name=f"{_NAMES.get(base)}.{suffix}", dtype=tensor.dtype, shape=tensor.shape,
        start=tensor.start, end=tensor.end, file=header.path,
        offset=_NORM_OFFSETS.get(model_type, 0.0) if base.endswith("_norm") else 0.0,
    )  # fmt: skip
    if whole.offset and tensor.dtype != "F32":
        raise GgufError(f"{header.path}: {tensor.name}: is stored as {tensor.dtype}")
    if base in _NAMES and suffix == "weight":
        yield whole
        return
    match = _LAYER.fullmatch(tensor.name)
    prefix = f"model.layers.{match[1]}." if match else ""
    part = match[2] if match else ""
    of_layers = {**_OF_LAYERS, **_OF_MODEL_TYPES.get(model_type, {})}
    of_experts = _OF_MIXTRALS_EXPERTS if model_type == "mixtral" else _OF_EXPERTS
    if part in of_layers:
        heads = _paired_heads(header, part, tensor)
        name = f"{prefix}{of_layers[part]}.{suffix}"
        # No module's.
        name = name.removesuffix(".weight") if part == "attn_sinks" else name
        yield dataclasses.replace(whole, name=name, num_paired_heads=heads)
    elif part in of_experts and len(tensor.shape) == (2 if suffix == "bias" else 3):
        size = (tensor.end - tensor.start) // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            start = tensor.start + expert * size
            name = f"{prefix}{of_experts[part].format(expert)}.{suffix}"
            yield dataclasses.replace(
                whole, name=name, shape=tensor.shape[1:], start=start, end=start + size
            )
    else:
        raise GgufError(f"{header.path}: {tensor.name}: has no known use")


def _paired_heads(header: GgufHeader, part: str, tensor: GgufTensor) -> int:
    architecture = header.metadata.get("general.architecture")
    if part not in _PAIRED or architecture not in _PAIRED_ARCHITECTURES:
        return 0
    key = f"{architecture}.{_PAIRED[part]}"
    heads = header.metadata.get(key, header.metadata.get(f"{architecture}.attention.head_count"))
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise GgufError(f"{header.path}: {tensor.name}: {tensor.shape[0]} rows of {heads} heads")
    return heads
