"""Small quantised checkpoints with random codes, packed in plain numpy; and the values meant."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCABULARY = 256, 384, 4, 2, 2, 128
NUM_EXPERTS = 4
LAYER_INPUT = 128
ARCHITECTURES = {
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Stored = dict[str, torch.Tensor]
"""By the last part of the name."""


def packed(numbers: Ints, bits: int) -> torch.Tensor:
    """Int32s [a, ceil(b * bits / 32)] of numbers [a, b] that are not negative."""
    per_word = 32 // bits
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // per_word) * per_word), dtype=np.uint64)
    padded[:, : numbers.shape[1]] = numbers
    places = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    words = (padded.reshape(len(numbers), -1, per_word) << places).sum(axis=-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _scales(shape: tuple[int, int], bits: int, draw: np.random.Generator) -> torch.Tensor:
    """At which weights are below 0.1 or so."""
    return torch.from_numpy(draw.uniform(0.5, 1, shape) * 2.0**-bits * 0.1).to(torch.bfloat16)


def _values(codes: Ints, zeros: Ints, scales: torch.Tensor) -> Array:
    """[N, K] of codes [N, K], zeros and scales [N, G]."""
    repeats = codes.shape[1] // zeros.shape[1]
    differences = (codes - zeros.repeat(repeats, axis=1)).astype(np.float32)
    return scales.float().numpy().repeat(repeats, axis=1) * differences


def _compressed(
    size: int, depth: int, draw: np.random.Generator, *, bits: int, group_size: int | None,
    has_zeros: bool, is_packed: bool = True,
) -> tuple[Stored, Array]:  # fmt: skip
    half = 1 << bits - 1
    num_groups = depth // (group_size or depth)
    codes = draw.integers(-half, half, (size, depth))
    zeros = np.zeros((size, num_groups), dtype=np.int64)
    if has_zeros:
        zeros = draw.integers(-half, half, zeros.shape)
    scales = _scales(zeros.shape, bits, draw)
    if is_packed:
        stored = {
            "weight_packed": packed(codes + half, bits),
            "weight_shape": torch.tensor([size, depth]),
            "weight_zero_point": packed(zeros.T + half, bits).T.contiguous(),
        }
    else:
        stored = {
            "weight": torch.from_numpy(codes.astype(np.int8)),
            "weight_zero_point": torch.from_numpy(zeros.astype(np.int8)),
        }
    if not has_zeros:
        del stored["weight_zero_point"]
    return {**stored, "weight_scale": scales}, _values(codes, zeros, scales)


def _gptq(
    size: int, depth: int, draw: np.random.Generator, *, bits: int, group_size: int | None,
    is_second: bool = False,
) -> tuple[Stored, Array]:  # fmt: skip
    num_groups = depth // (group_size or depth)
    codes = draw.integers(0, 1 << bits, (size, depth))
    zeros = draw.integers(1, 1 << bits, (size, num_groups))
    scales = _scales(zeros.shape, bits, draw).half()
    stored = {
        "qweight": packed(codes, bits).T.contiguous(),
        "qzeros": packed(zeros.T - (not is_second), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(depth, dtype=torch.int32) // (group_size or depth),
    }
    return stored, _values(codes, zeros, scales)


def _awq(size: int, depth: int, draw: np.random.Generator) -> tuple[Stored, Array]:
    codes = draw.integers(0, 16, (size, depth))
    zeros = draw.integers(0, 16, (size, depth // 64))
    scales = _scales(zeros.shape, 4, draw).half()
    order = [8 * (i // 8) + [0, 2, 4, 6, 1, 3, 5, 7][i % 8] for i in range(size)]
    stored = {
        "qweight": packed(codes.T[:, order], 4),
        "qzeros": packed(zeros.T[:, order], 4),
        "scales": scales.T.contiguous(),
    }
    return stored, _values(codes, zeros, scales)


def _fp8(
    size: int, depth: int, draw: np.random.Generator, *, block: tuple[int, int] | None,
    name: str = "weight_scale",
) -> tuple[Stored, Array]:  # fmt: skip
    """Args: block: rows and columns that share a scale, 0: all; None: all share one."""
    values = torch.from_numpy(draw.normal(0, 60, (size, depth)))
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    rows, columns = (block[0] or size, block[1] or depth) if block else (size, depth)
    scales = _scales((-(-size // rows), -(-depth // columns)), 8, draw).float() * 4
    spread = scales.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
    stored = {"weight": codes, name: scales if block else scales.reshape(1)}
    if not block:
        stored["input_scale"] = torch.ones(1)
    return stored, (codes.float() * spread[:size, :depth]).numpy()


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.1,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:4.0"]},
        "pack_dtype": "int32",
        **more,
    }


def compressed_config(bits: int, group_size: int | None, **changes: Any) -> dict[str, Any]:
    """Of compressed-tensors. Args: changes: of the group's weights."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": group_size,
                    "num_bits": bits,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "channel" if group_size is None else "group",
                    "symmetric": True,
                    "type": "int",
                    **changes,
                },
            }
        },
    }


def fp8_config(strategy: str, **changes: Any) -> dict[str, Any]:
    """Of compressed-tensors. Args: changes: of the group's weights."""
    config = compressed_config(8, None, type="float", strategy=strategy, **changes)
    group = config["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    config["format"] = group["format"] = "float-quantized"
    return config


Make = Callable[[int, int, np.random.Generator], tuple[Stored, Array]]
"""Makes a layer's tensors, and its values, from N, K."""


def _of(function: Any, **options: Any) -> Make:
    return lambda size, depth, draw: function(size, depth, draw, **options)


METHODS: Mapping[str, tuple[Make, dict[str, Any]]] = {
    "packed_int4": (
        _of(_compressed, bits=4, group_size=128, has_zeros=False),
        compressed_config(4, 128),
    ),
    "packed_int4_zeros": (
        _of(_compressed, bits=4, group_size=32, has_zeros=True),
        compressed_config(4, 32, symmetric=False, actorder="static"),
    ),
    "packed_int4_channel": (
        _of(_compressed, bits=4, group_size=None, has_zeros=True),
        compressed_config(4, None, symmetric=False),
    ),
    "packed_int8": (
        _of(_compressed, bits=8, group_size=64, has_zeros=True),
        compressed_config(8, 64, symmetric=False),
    ),
    "int8": (
        _of(_compressed, bits=8, group_size=None, has_zeros=False, is_packed=False),
        {**compressed_config(8, None), "format": "int-quantized"},
    ),
    "gptq_int4": (
        _of(_gptq, bits=4, group_size=128),
        gptq_config(4, 128, checkpoint_format="gptq"),
    ),
    "gptq_int4_v2": (
        _of(_gptq, bits=4, group_size=None, is_second=True),
        gptq_config(4, -1, checkpoint_format="gptq_v2"),
    ),
    "gptq_int8": (_of(_gptq, bits=8, group_size=32), gptq_config(8, 32)),
    "fp8_tensor": (
        _of(_fp8, block=None),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8_channel": (_of(_fp8, block=(1, 0)), fp8_config("channel")),
    "fp8_blocks": (
        _of(_fp8, block=(128, 128), name="weight_scale_inv"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    ),
    "fp8_cut_blocks": (
        _of(_fp8, block=(96, 160)),
        fp8_config("block", block_structure=[96, 160]),
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
    ),
}


def write_quantized(
    folder: Path,
    method: str,
    *,
    model_type: str = "llama",
    plain: tuple[str, ...] = (),
    inner: int = INNER,
) -> dict[str, torch.Tensor]:
    """Writes a model.

    Args:
        method: a key of `METHODS`.
        model_type: a key of `ARCHITECTURES`.
        plain: parts of the names of layers that are not quantised.
        inner: of an MLP that is no expert.

    Returns:
        The values of all weights in float32.
    """
    make, quantization = METHODS[method]
    draw = np.random.default_rng(7)
    stored: Stored = {}
    values: dict[str, torch.Tensor] = {}

    def add(name: str, mean: float, *shape: int) -> None:
        spread = 0.3 if "embed" in name else 0.08
        tensor = torch.from_numpy(draw.normal(mean, spread, shape)).to(torch.bfloat16)
        stored[name], values[name] = tensor, tensor.float()

    def add_layer(name: str, size: int, depth: int) -> None:
        if any(part in name for part in plain):
            add(f"{name}.weight", 0, size, depth)
            return
        tensors, meant = make(size, depth, draw)
        stored.update({f"{name}.{part}": tensor for part, tensor in tensors.items()})
        values[f"{name}.weight"] = torch.from_numpy(meant)

    head_dim = HIDDEN // HEADS
    add("model.embed_tokens.weight", 0, VOCABULARY, HIDDEN)
    add("lm_head.weight", 0, VOCABULARY, HIDDEN)
    add("model.norm.weight", 1, HIDDEN)
    is_gemma = model_type == "gemma4_text"
    if is_gemma:
        add_layer("model.embed_tokens_per_layer", VOCABULARY, LAYERS * LAYER_INPUT)
        add_layer("model.per_layer_model_projection", LAYERS * LAYER_INPUT, HIDDEN)
        add("model.per_layer_projection_norm.weight", 1, LAYER_INPUT)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if is_gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            norms += ["post_per_layer_input_norm"]
            add_layer(f"{prefix}per_layer_input_gate", LAYER_INPUT, HIDDEN)
            add_layer(f"{prefix}per_layer_projection", HIDDEN, LAYER_INPUT)
            add(f"{prefix}layer_scalar", 1, 1)
        for name in norms:
            add(f"{prefix}{name}.weight", 1, HIDDEN)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add_layer(f"{prefix}self_attn.{name}_proj", heads * head_dim, HIDDEN)
        add_layer(f"{prefix}self_attn.o_proj", HIDDEN, HIDDEN)
        if model_type != "llama":
            for name in ("q_norm", "k_norm"):
                add(f"{prefix}self_attn.{name}.weight", 1, head_dim)
        modules, size = [f"{prefix}mlp."], inner
        if model_type == "qwen3_moe":
            add(f"{prefix}mlp.gate.weight", 0, NUM_EXPERTS, HIDDEN)
            modules, size = [f"{prefix}mlp.experts.{i}." for i in range(NUM_EXPERTS)], 64
        for module in modules:
            for name in ("gate", "up"):
                add_layer(f"{module}{name}_proj", size, HIDDEN)
            add_layer(f"{module}down_proj", HIDDEN, size)
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    whole = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": VOCABULARY - 1,
        "quantization_config": quantization,
    }
    if model_type == "qwen3_moe":
        whole |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
        whole |= {"moe_intermediate_size": 64, "norm_topk_prob": True}
    if is_gemma:
        del whole["hidden_act"], whole["rope_theta"]
        whole |= {"global_head_dim": head_dim, "hidden_size_per_layer_input": LAYER_INPUT}
        whole |= {"vocab_size_per_layer_input": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(whole))
    return values
