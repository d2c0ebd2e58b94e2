"""A GGUF file's tensors by the names that transformers' checkpoints have."""

import re
from collections.abc import Iterator, Mapping

from servicekit.gguf.config import ROPE_FACTORS
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
# Of all experts in one, [experts, outputs, inputs].
_OF_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
# Whose head counts tell how rows of queries and keys are paired.
_PAIRED_ARCHITECTURES = ("llama",)
_PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def stored_as(header: GgufHeader) -> dict[str, StoredTensor]:
    """The tensors by their names in transformers' checkpoints.

    Raises:
        GgufError: one has no known use.
    """
    return {
        each.name: each
        for tensor in header.tensors.values()
        if tensor.name != ROPE_FACTORS
        for each in _stored(header, tensor)
    }


def _stored(header: GgufHeader, tensor: GgufTensor) -> Iterator[StoredTensor]:
    def at(name: str, shape: tuple[int, ...], start: int, end: int, heads: int = 0) -> StoredTensor:
        return StoredTensor(
            name=name, dtype=tensor.dtype, shape=shape, start=start, end=end, file=header.path,
            num_paired_heads=heads,
        )  # fmt: skip

    base, _, suffix = tensor.name.rpartition(".")
    if base in _NAMES and suffix == "weight":
        yield at(f"{_NAMES[base]}.weight", tensor.shape, tensor.start, tensor.end)
        return
    match = _LAYER.fullmatch(tensor.name)
    prefix = f"model.layers.{match[1]}." if match else ""
    part = match[2] if match else ""
    if part in _OF_LAYERS:
        name = f"{prefix}{_OF_LAYERS[part]}.{suffix}"
        heads = _paired_heads(header, part, tensor)
        yield at(name, tensor.shape, tensor.start, tensor.end, heads)
    elif part in _OF_EXPERTS and len(tensor.shape) == 3:
        size = (tensor.end - tensor.start) // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            start = tensor.start + expert * size
            name = f"{prefix}mlp.experts.{expert}.{_OF_EXPERTS[part]}.{suffix}"
            yield at(name, tensor.shape[1:], start, start + size)
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
