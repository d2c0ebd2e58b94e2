"""Small GGUF files, written by the `gguf` package."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
DELTA_KEYS, DELTA_VALUES, DELTA_HEAD = 2, 4, 64
# Every byte has a character of the byte-level alphabet; some merges; an end token.
_ALPHABET = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _ALPHABET]
BYTES = [chr(c) for c in _ALPHABET] + [chr(256 + i) for i in range(len(_OTHERS))]
MERGES = ["t h", "th e", "Ġ the", "i n"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<|tool|>"]
END, TOOL = len(TOKENS) - 2, len(TOKENS) - 1
VOCABULARY = len(TOKENS)
# Every type that is served, by a part of the tensor's name.
ALL_TYPES = {
    "token_embd": "Q8_0",
    "attn_v": "Q6_K",
    "attn_q": "Q5_0",
    "attn_k": "Q5_1",
    "attn_output": "F16",
    # Routers.
    "ffn_gate_inp": "F32",
    "ffn_down": "Q4_K",
    "ffn_up": "Q5_K",
    "ffn_gate": "Q4_1",
    "": "Q4_0",
}
_SCALES = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}


def some_rows(name: str, shape: tuple[int, int], draw: np.random.Generator) -> npt.NDArray[Any]:
    """Rows of a type as in a file: quantised if the package can, else bytes with small scales."""
    kind = gguf.GGMLQuantizationType[name]
    values = draw.normal(0, 0.08, shape).astype(np.float32)
    if name not in _SCALES:
        return np.asarray(gguf.quantize(values, kind))
    depth, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // depth, size), dtype=np.uint8)
    for at in _SCALES[name]:
        scales = draw.normal(0, 2e-4, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)


def write_model(
    path: Path,
    types: Mapping[str, str] | str,
    *,
    architecture: str = "llama",
    num_experts: int = 0,
    tensors_per_file: int = 0,
    context: int = 512,
    metadata: Mapping[str, Any] | None = None,
    vectors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """A model with random weights.

    Args:
        types: of weights, by a part of the tensor's name; or of all of them.
        num_experts: of which two are used; 0: an MLP instead.
        tensors_per_file: 0: all in one file; else the path returned is of the first of several.
        context: tokens, at most.
        metadata: further keys, of numbers, truths, strings and lists.
        vectors: further tensors.
    """
    draw = np.random.default_rng(5)
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    is_gpt_oss = architecture == "gpt-oss"
    has_delta_nets = architecture in DELTA_NETS
    if has_delta_nets:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(DELTA_HEAD)
        writer.add_ssm_group_count(DELTA_KEYS)
        writer.add_ssm_time_step_rank(DELTA_VALUES)
        writer.add_ssm_inner_size(DELTA_VALUES * DELTA_HEAD)
        writer.add_full_attention_interval(2)
        writer.add_rope_dimension_count(HIDDEN // HEADS // 2)
    if architecture == "granite":
        writer.add_attention_scale(0.21)
        writer.add_embedding_scale(3.0)
        writer.add_residual_scale(0.22)
        writer.add_logit_scale(6.0)
    if architecture.startswith(("gemma", "qwen3", "gpt-oss")):
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
    if architecture.startswith(("gemma", "gpt-oss")):
        writer.add_sliding_window(16)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
        if has_delta_nets:
            writer.add_expert_shared_feed_forward_length(INNER)
        if architecture in ("qwen3moe", "gpt-oss") or has_delta_nets:
            writer.add_expert_feed_forward_length(INNER)
    if "tokenizer.ggml.tokens" not in (metadata or {}):
        add_byte_level_vocabulary(writer)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1 or name.endswith(".bias"):
            values = draw.normal(1 if "norm" in name else 0, 0.1, shape).astype(np.float32)
            writer.add_tensor(name, values)
            return
        kind = types if isinstance(types, str) else _chosen(types, name)
        rows = some_rows(kind, (int(np.prod(shape[:-1])), shape[-1]), draw)
        rows = rows.reshape(*shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", VOCABULARY, HIDDEN)
    norms = ["attn_norm", "ffn_norm"]
    if architecture.startswith("gemma"):
        norms += ["post_attention_norm", "post_ffw_norm"]
    if is_gpt_oss or has_delta_nets:
        norms = ["attn_norm", "post_attention_norm"]
    if architecture == "olmo2":
        norms = ["post_attention_norm", "post_ffw_norm"]
    of_queries = [("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)]
    if architecture == "phi3":
        of_queries = [("attn_qkv", HIDDEN + 2 * kv)]
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name in norms:
            add(f"{prefix}{name}.weight", HIDDEN)
        own = of_queries
        if has_delta_nets:
            own = [("attn_q", 2 * HIDDEN), ("attn_k", kv), ("attn_v", kv)]
        if has_delta_nets and not layer % 2:
            own = []
            _add_delta_net(add, writer, prefix, architecture, draw)
        for name, size in own:
            add(f"{prefix}{name}.weight", size, HIDDEN)
            if architecture in ("qwen2", "gpt-oss"):
                add(f"{prefix}{name}.bias", size)
        if architecture in ("gemma3", "qwen3", "qwen3moe") or (has_delta_nets and own):
            for name in ("attn_q_norm", "attn_k_norm"):
                add(f"{prefix}{name}.weight", HIDDEN // HEADS)
        if architecture == "olmo2":
            add(f"{prefix}attn_q_norm.weight", HIDDEN)
            add(f"{prefix}attn_k_norm.weight", kv)
        if own:
            add(f"{prefix}attn_output.weight", HIDDEN, HIDDEN)
        if is_gpt_oss:
            add(f"{prefix}attn_output.bias", HIDDEN)
            add(f"{prefix}attn_sinks.weight", HEADS)
            add(f"{prefix}ffn_gate_inp.bias", num_experts)
            for name, size in (("gate", INNER), ("up", INNER), ("down", HIDDEN)):
                add(f"{prefix}ffn_{name}_exps.bias", num_experts, size)
        if num_experts:
            add(f"{prefix}ffn_gate_inp.weight", num_experts, HIDDEN)
            for name in ("ffn_gate_exps", "ffn_up_exps"):
                add(f"{prefix}{name}.weight", num_experts, INNER, HIDDEN)
            add(f"{prefix}ffn_down_exps.weight", num_experts, HIDDEN, INNER)
            if has_delta_nets:
                add(f"{prefix}ffn_gate_inp_shexp.weight", HIDDEN)
                for name in ("ffn_gate_shexp", "ffn_up_shexp"):
                    add(f"{prefix}{name}.weight", INNER, HIDDEN)
                add(f"{prefix}ffn_down_shexp.weight", HIDDEN, INNER)
            continue
        if architecture == "phi3":
            add(f"{prefix}ffn_up.weight", 2 * INNER, HIDDEN)
        else:
            for name in ("ffn_gate", "ffn_up"):
                add(f"{prefix}{name}.weight", INNER, HIDDEN)
        add(f"{prefix}ffn_down.weight", HIDDEN, INNER)
    add("output_norm.weight", HIDDEN)
    for name, values in (vectors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*"))[0] if tensors_per_file else path


def _add_delta_net(
    add: Callable[..., None],
    writer: gguf.GGUFWriter,
    prefix: str,
    architecture: str,
    draw: np.random.Generator,
) -> None:
    keys, values = 2 * DELTA_KEYS * DELTA_HEAD, DELTA_VALUES * DELTA_HEAD
    add(f"{prefix}attn_qkv.weight", keys + values, HIDDEN)
    add(f"{prefix}attn_gate.weight", values, HIDDEN)
    if architecture == "qwen3next":
        add(f"{prefix}ssm_ba.weight", 2 * DELTA_VALUES, HIDDEN)
    else:
        for name in ("ssm_alpha", "ssm_beta"):
            add(f"{prefix}{name}.weight", DELTA_VALUES, HIDDEN)
    add(f"{prefix}ssm_norm.weight", DELTA_HEAD)
    add(f"{prefix}ssm_dt.bias", DELTA_VALUES)
    add(f"{prefix}ssm_out.weight", HIDDEN, values)
    for name, floats in {
        "ssm_conv1d.weight": draw.normal(0, 0.5, (keys + values, 4)),
        "ssm_a": -np.exp(draw.normal(-3, 1, DELTA_VALUES)),
    }.items():
        writer.add_tensor(prefix + name, floats.astype(np.float32))


def add_byte_level_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([1] * (VOCABULARY - 2) + [3, 4])
    writer.add_eos_token_id(END)


def _chosen(types: Mapping[str, str], name: str) -> str:
    return next((kind for part, kind in types.items() if part in name), types[""])
