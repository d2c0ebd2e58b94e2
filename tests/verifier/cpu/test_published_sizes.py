"""The config.json of published sizes, without weights: each is understood, as published and as
transformers saves it again.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from tests.verifier.cpu.test_gpt_oss import MXFP4
from verifier.checkpoint.description import _shapes
from verifier.checkpoint.families import FAMILIES
from verifier.checkpoint.model_config import read_model_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
        "attention_factor": 1.2079441541679836,
        "original_max_position_embeddings": 8192}  # fmt: skip
EIGHT = {"rope_type": "linear", "factor": 8.0}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
GEMMA4_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                       "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
GEMMA4 = {"vocab_size": 262144, "head_dim": 256, "global_head_dim": 512,
          "rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 30.0,
          "hidden_activation": "gelu_pytorch_tanh", "num_kv_shared_layers": 0,
          **TIED}  # fmt: skip
FIVE_SLIDING = [*5 * ["sliding_attention"], "full_attention"]
PAIRS = ["sliding_attention", "full_attention"]
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
MROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
         "mrope_interleaved": True, "mrope_section": [11, 11, 10]}  # fmt: skip
QWEN3_5 = {"vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144,
           "rope_parameters": MROPE, "full_attention_interval": 4, "attn_output_gate": True,
           "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
           "linear_value_head_dim": 128, "linear_num_key_heads": 16, "mtp_num_hidden_layers": 1,
           "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
           "mlp_only_layers": []}  # fmt: skip
# What all sizes of a family tell besides.
SHARED: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 128256, "rope_theta": 5e5, "rope_scaling": LLAMA3, "mlp_bias": False,
              "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    "qwen2": {"vocab_size": 152064, "rope_theta": 1e6, "use_sliding_window": False,
              "sliding_window": 131072, "max_window_layers": 28, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "rope_theta": 1e6, "head_dim": 128, "sliding_window": None,
              "use_sliding_window": False, "max_window_layers": 28, "attention_bias": False,
              "max_position_embeddings": 40960, "rope_scaling": None},
    "qwen3_moe": {"vocab_size": 151936, "rope_theta": 1e6, "head_dim": 128, "num_experts": 128,
                  "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                  "mlp_only_layers": [], "max_position_embeddings": 40960,
                  "router_aux_loss_coef": 0.001, "sliding_window": None},
    "mistral": {"vocab_size": 131072, "rope_theta": 1e6, "head_dim": 128, "sliding_window": None,
                "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    "mixtral": {"vocab_size": 32000, "rope_theta": 1e6, "num_experts_per_tok": 2,
                "num_local_experts": 8, "output_router_logits": False, "sliding_window": None,
                "max_position_embeddings": 32768},
    "gemma2": {"vocab_size": 256000, "head_dim": 256, "sliding_window": 4096,
               "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
               "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
               "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"vocab_size": 262144, "head_dim": 256, "sliding_window": 512,
                    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
                    "max_position_embeddings": 32768, "sliding_window_pattern": 6},
    "gemma4_text": {**GEMMA4, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
                    "enable_moe_block": False, "expert_intermediate_size": None,
                    "num_experts": None, "top_k_experts": None,
                    "use_bidirectional_attention": None, "max_position_embeddings": 131072},
    "gemma4_unified_text": {**GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144},
    "phi3": {"rope_theta": 1e4, "max_position_embeddings": 131072, "pad_token_id": 0,
             "original_max_position_embeddings": 4096, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "olmo2": {"vocab_size": 100352, "rope_theta": 5e5, "max_position_embeddings": 4096},
    "olmo3": {"vocab_size": 100278, "rope_theta": 5e5, "max_position_embeddings": 65536,
              "sliding_window": 4096, "rope_scaling": YARN},
    "granite": {"vocab_size": 49159, "rope_theta": 1e7, "max_position_embeddings": 131072,
                "attention_bias": False, **MULTIPLIERS, **TIED},
    "smollm3": {"vocab_size": 128256, "rope_theta": 5e6, "max_position_embeddings": 65536,
                "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, **TIED},
    "gpt_oss": {"vocab_size": 201088, "rope_theta": 150000, "max_position_embeddings": 131072,
                "head_dim": 64, "sliding_window": 128, "rope_scaling": OSS_YARN,
                "attention_bias": True, "num_experts_per_tok": 4, "experts_per_token": 4,
                "initial_context_length": 4096, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
                "quantization_config": MXFP4, **UNTIED},
    "qwen3_next": {"vocab_size": 151936, "head_dim": 256, "max_position_embeddings": 262144,
                   "rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.25,
                   "full_attention_interval": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
                   "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                   "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                   "linear_num_value_heads": 32, "moe_intermediate_size": 512,
                   "shared_expert_intermediate_size": 512, "num_experts": 512,
                   "num_experts_per_tok": 10, "norm_topk_prob": True, "use_sliding_window": False,
                   "router_aux_loss_coef": 0.001, "output_router_logits": False, **UNTIED},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": {**QWEN3_5, "num_experts": 256, "num_experts_per_tok": 8, **UNTIED},
}  # fmt: skip
# Billions of parameters as published; family; hidden size, of the MLP, layers, heads, key heads.
SIZES: list[tuple[float, str, tuple[int, int, int, int, int], dict[str, Any]]] = [
    (1.24, "llama", (2048, 8192, 16, 32, 8), {**TIED, "rope_scaling": {**LLAMA3, "factor": 32.0}}),
    (3.21, "llama", (3072, 8192, 28, 24, 8), {**TIED, "head_dim": 128}),
    (8.03, "llama", (4096, 14336, 32, 32, 8), {}),
    (0.135, "llama", (576, 1536, 30, 9, 3), {**TIED, "vocab_size": 49152, "rope_scaling": None}),
    (0.494, "qwen2", (896, 4864, 24, 14, 2), {**TIED, "vocab_size": 151936}),
    (7.62, "qwen2", (3584, 18944, 28, 28, 4), {}),
    (0.596, "qwen3", (1024, 3072, 28, 16, 8), TIED),
    (8.19, "qwen3", (4096, 12288, 36, 32, 8), UNTIED),
    (30.5, "qwen3_moe", (2048, 6144, 48, 32, 4), {"moe_intermediate_size": 768}),
    (7.25, "mistral", (4096, 14336, 32, 32, 8), {"vocab_size": 32768}),
    (23.6, "mistral", (5120, 32768, 40, 32, 8), {"rope_theta": 1e8}),
    (46.7, "mixtral", (4096, 14336, 32, 32, 8), {}),
    (2.61, "gemma2", (2304, 9216, 26, 8, 4), {}),
    (27.2, "gemma2", (4608, 36864, 46, 32, 16), {"head_dim": 128, "query_pre_attn_scalar": 144}),
    (0.268, "gemma3_text", (640, 2048, 18, 4, 1), {}),
    (3.88, "gemma3_text", (2560, 10240, 34, 8, 4), {"rope_scaling": EIGHT, "sliding_window": 1024}),
    (27.0, "gemma3_text", (5376, 21504, 62, 32, 16), {"rope_scaling": EIGHT, "head_dim": 128,
                                                      "query_pre_attn_scalar": 168}),
    (4.62, "gemma4_text", (1536, 6144, 35, 8, 1), {
        "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": 7 * [*4 * ["sliding_attention"], "full_attention"]}),
    (7.46, "gemma4_text", (2560, 10240, 42, 8, 2), {
        "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18,
        "layer_types": 7 * FIVE_SLIDING}),
    (11.9, "gemma4_unified_text", (3840, 15360, 48, 16, 8), {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": 8 * FIVE_SLIDING,
        "use_bidirectional_attention": "vision"}),
    (25.2, "gemma4_text", (2816, 2112, 30, 16, 8), {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024,
        "num_global_key_value_heads": 2, "layer_types": 5 * FIVE_SLIDING, "enable_moe_block": True,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}),
    (30.7, "gemma4_text", (5376, 21504, 60, 32, 16), {
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 4, "sliding_window": 1024, "layer_types": 10 * FIVE_SLIDING,
        "use_bidirectional_attention": "vision", "max_position_embeddings": 262144}),
    (3.82, "phi3", (3072, 8192, 32, 32, 32), {"vocab_size": 32064, "rope_scaling": LONGROPE,
                                              "sliding_window": 262144}),
    (14.7, "phi3", (5120, 17920, 40, 40, 10), {"vocab_size": 100352, "rope_theta": 250000,
                                               "original_max_position_embeddings": 16384,
                                               "max_position_embeddings": 16384}),
    (3.84, "phi3", (3072, 8192, 32, 24, 8), {"vocab_size": 200064, "rope_scaling": LONGROPE, **TIED,
                                             "partial_rotary_factor": 0.75,
                                             "sliding_window": 262144}),
    (7.3, "olmo2", (4096, 11008, 32, 32, 32), {}),
    (32.2, "olmo2", (5120, 27648, 64, 40, 8), {}),
    (32.2, "olmo3", (5120, 27648, 64, 40, 8), {}),
    (2.53, "granite", (2048, 8192, 40, 32, 8), {"attention_multiplier": 0.015625,
                                                "logits_scaling": 8.0}),
    (3.08, "smollm3", (2048, 11008, 36, 16, 4), {}),
    (20.9, "gpt_oss", (2880, 2880, 24, 64, 8), {"num_local_experts": 32,
                                                "layer_types": 12 * PAIRS}),
    (79.7, "qwen3_next", (2048, 5120, 48, 16, 2), {}),
    (0.752, "qwen3_5_text", (1024, 3584, 24, 8, 2), {"linear_num_value_heads": 16, **TIED}),
    (4.21, "qwen3_5_text", (2560, 9216, 32, 16, 4), {"linear_num_value_heads": 32, **TIED}),
    (26.9, "qwen3_5_text", (5120, 17408, 64, 24, 4), {
        "linear_num_value_heads": 48, "layer_types": 16 * [*3 * ["linear_attention"],
                                                           "full_attention"], **UNTIED}),
    (34.7, "qwen3_5_moe_text", (2048, 512, 40, 16, 2), {
        "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512}),
    (396.3, "qwen3_5_moe_text", (4096, 512, 60, 32, 2), {
        "linear_num_value_heads": 64, "moe_intermediate_size": 1024, "num_experts": 512,
        "num_experts_per_tok": 10, "shared_expert_intermediate_size": 1024}),
]  # fmt: skip
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads")  # fmt: skip


def test_every_family_has_a_published_size() -> None:
    assert {family for _, family, *_ in SIZES} == set(FAMILIES)


@pytest.mark.parametrize(
    ("billions", "family", "shape", "more"), SIZES, ids=[f"{s[1]} {s[0]}" for s in SIZES]
)
def test_a_published_size_is_understood(
    billions: float, family: str, shape: tuple[int, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    content = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **dict(zip(KEYS, shape, strict=True)),
        **SHARED[family],
        **more,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_model_config(tmp_path)
    num_parameters = sum(map(math.prod, _shapes(config).values()))
    assert num_parameters == pytest.approx(billions * 1e9, rel=5e-3)
    theirs = AutoConfig.from_pretrained(tmp_path)
    kinds = getattr(theirs, "layer_types", None)
    if kinds:
        windows = [layer.sliding_window > 0 for layer in config.layers]
        assert windows == [kind == "sliding_attention" for kind in kinds]
        deltas = [layer.is_delta for layer in config.layers]
        assert deltas == [kind == "linear_attention" for kind in kinds]
    theirs.save_pretrained(tmp_path / "again")
    again = read_model_config(tmp_path / "again")
    np.testing.assert_equal(dataclasses.asdict(again), dataclasses.asdict(config))
