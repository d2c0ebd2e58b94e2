"""Loaded weights, computed by the numpy oracle, give transformers' logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.verifier.cpu.numpy_decoder import all_logits, unpacked
from tests.verifier.cpu.running_decoder import load
from verifier.checkpoint.weight_types import WeightType
from verifier.transformers_model.checkpoint import load_checkpoint
from verifier.transformers_model.fp8_weights import quantise_linear_layers

# Its type information lacks some classes.
TRANSFORMERS: Any = transformers
# 112 is no power of two, 40 no multiple of 16, 97 neither.
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large, so that attention is far from uniform.
    "initializer_range": 0.3,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Of 8 pairs.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 1.5 * i for i in range(8)],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
# Two value heads for each key head.
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GEMMA4 = {
    **SMALL,
    "head_dim": 32,
    "global_head_dim": 48,
    "sliding_window": 20,
    "final_logit_softcapping": 5.0,
    # Large, so that what is scaled before a norm counts.
    "rms_norm_eps": 0.01,
    "vocab_size_per_layer_input": 99,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama_tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama_biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama_llama3": lambda: LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama_linear": lambda: LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    ),
    "llama_yarn": lambda: LlamaConfig(
        **SMALL, rope_parameters={**YARN, "original_max_position_embeddings": 128}
    ),
    "qwen3_yarn": lambda: Qwen3Config(
        **SMALL,
        head_dim=32,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 100,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
    ),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=20),
    "mistral_full": lambda: MistralConfig(**SMALL, sliding_window=None, head_dim=32),
    "qwen2": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen2_no_window": lambda: Qwen2Config(**SMALL, sliding_window=20, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32, attention_bias=True),
    "gemma2": lambda: Gemma2Config(
        **SMALL,
        head_dim=48,
        sliding_window=20,
        query_pre_attn_scalar=30,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, head_dim=48, sliding_window=20, layer_types=MIXED, query_pre_attn_scalar=40
    ),
    "gemma3_linear": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=48,
        sliding_window=20,
        layer_types=MIXED,
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # The last layers attend to other layers' K/V, of both kinds.
    "gemma4": lambda: TRANSFORMERS.Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 6},
        layer_types=["sliding_attention", "full_attention"] * 3,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4_dense": lambda: TRANSFORMERS.Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4_mixture": lambda: TRANSFORMERS.Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4_unified": lambda: TRANSFORMERS.Gemma4UnifiedTextConfig(
        **{key: GEMMA4[key] for key in GEMMA4 if not key.endswith("per_layer_input")},
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=1,
    ),
    "phi3": lambda: Phi3Config(**SMALL, sliding_window=20, pad_token_id=0),
    "phi3_partial": lambda: Phi3Config(
        **{**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1},
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
        },
    ),
    "phi3_longrope": lambda: Phi3Config(
        **SMALL, pad_token_id=0, original_max_position_embeddings=128, rope_parameters=LONGROPE
    ),
    "phi3_longrope_partial": lambda: Phi3Config(
        **{**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1},
        pad_token_id=0,
        original_max_position_embeddings=128,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5, "attention_factor": 1.25},
    ),
    "olmo2": lambda: TRANSFORMERS.Olmo2Config(**SMALL, pad_token_id=0, attention_bias=True),
    "olmo3": lambda: TRANSFORMERS.Olmo3Config(
        **{**SMALL, "num_hidden_layers": 4},
        pad_token_id=0,
        sliding_window=20,
        rope_parameters={
            "full_attention": {**YARN, "original_max_position_embeddings": 128},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "granite": lambda: TRANSFORMERS.GraniteConfig(
        **SMALL,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.21,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "smollm3": lambda: TRANSFORMERS.SmolLM3Config(
        **SMALL,
        pad_token_id=0,
        no_rope_layers=[1, 0, 1],
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    ),
    "smollm3_windows": lambda: TRANSFORMERS.SmolLM3Config(
        **SMALL,
        pad_token_id=0,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=20,
    ),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, sliding_window=20),
    "gpt_oss": lambda: TRANSFORMERS.GptOssConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=20,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SMALL,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3_moe_step": lambda: Qwen3MoeConfig(
        **SMALL,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=20,
    ),
    "qwen3_next": lambda: TRANSFORMERS.Qwen3NextConfig(
        **{**SMALL, **DELTA, **SHARED_EXPERT}, mlp_only_layers=[1], norm_topk_prob=False
    ),
    # States of several pieces; a key head for each value head.
    "qwen3_5": lambda: TRANSFORMERS.Qwen3_5TextConfig(
        **{**SMALL, **DELTA, "linear_value_head_dim": 96, "linear_num_key_heads": 4},
        layer_types=["full_attention", *["linear_attention"] * 3],
        linear_conv_kernel_dim=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": lambda: TRANSFORMERS.Qwen3_5MoeTextConfig(
        **{key: SMALL[key] for key in SMALL if key != "intermediate_size"} | DELTA | SHARED_EXPERT,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
        },
    ),
}
TEXT = [(37 * i + 11) % 97 for i in range(48)]


def save(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, *, is_smaller: bool = False
) -> Any:
    """Writes a random model of `CONFIGS` to a folder, norms and biases included.

    Args:
        is_smaller: with two layers and half of the heads.
    """
    config = CONFIGS[name]()
    if is_smaller:
        config.num_hidden_layers = 2
        config.num_attention_heads //= 2
        config.num_key_value_heads //= 2
        if hasattr(config, "layer_types"):
            config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key or ("router." in key and "scale" in key):
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        for key, buffer in model.named_buffers():
            if "layer_scalar" in key:
                buffer.uniform_(0.5, 1.5)
        for key, parameter in model.named_parameters():
            if "sinks" in key:
                parameter.data.mul_(5)
            if "A_log" in key:
                # Slowly, as trained models do: other states would hardly last for a token.
                parameter.data.sub_(4)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def reference(folder: Path, dtype: str = "auto") -> Any:
    """Logits [T, V] by transformers, in float32, with weights rounded to a type."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation="eager",
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0].double().numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_family_are_transformers_ones(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    expected = reference(tmp_path)
    logits = all_logits(load(tmp_path), TEXT)
    assert np.abs(logits - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral"])
def test_sixteen_bit_weights_are_kept_and_computed_as_their_values(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save(tmp_path, name, dtype)
    weights = load(tmp_path)
    expected_type = {torch.bfloat16: WeightType.BFLOAT16, torch.float16: WeightType.FLOAT16}[dtype]
    assert weights.linear_type is weights.other_type is expected_type
    assert weights.head.blocks.dtype == expected_type.value
    expected = reference(tmp_path)
    logits = all_logits(weights, TEXT)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted_as_torch_converts(
    source: torch.dtype, target: str, tmp_path: Path
) -> None:
    save(tmp_path, "llama_biases", source)
    expected = reference(tmp_path, target)
    logits = all_logits(load(tmp_path, dtype=target), TEXT)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_weights_have_the_values_of_the_models_own_fp8_layers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = save(tmp_path, "llama_biases", dtype)
    weights = load(tmp_path, quantization="fp8")
    quantise_linear_layers(model, torch.device("cpu"))
    layer = model.model.layers[1]
    ours = unpacked(weights.layers[1].qkv, WeightType.FP8)
    q, k = layer.self_attn.q_proj, layer.self_attn.k_proj
    assert (ours[:64] == (q.weight.float() * q.scale).numpy()).all()
    assert (ours[64:96] == (k.weight.float() * k.scale).numpy()).all()
    down = layer.mlp.down_proj
    assert weights.layers[1].down is not None
    ours = unpacked(weights.layers[1].down, WeightType.FP8)
    assert (ours[:, :40] == (down.weight.float() * down.scale).numpy()).all()
    assert (ours[:, 40:] == 0).all()
    assert weights.other_type is load(tmp_path).other_type


@pytest.mark.parametrize(
    ("stored", "dtype", "told"),
    [
        (torch.float32, "bfloat16", ["F32"]),
        (torch.bfloat16, "float16", ["BF16"]),
        (torch.bfloat16, "bfloat16", []),
        (torch.float16, "float32", []),
    ],
)
def test_weights_that_are_rounded_to_the_configurations_dtype_are_told(
    stored: torch.dtype, dtype: str, told: list[str], tmp_path: Path
) -> None:
    save(tmp_path, "llama", stored)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": dtype}))
    for load_it in (
        lambda: load(tmp_path),
        lambda: load_checkpoint(tmp_path, dtype=dtype, device=torch.device("cpu")),
    ):
        with capture_logs() as log:
            load_it()
        found = [entry for entry in log if entry["event"] == "weights_rounded"]
        assert [entry["stored"] for entry in found] == told
        assert all(entry["dtype"] == dtype for entry in found)
