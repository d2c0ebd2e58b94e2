"""What the decoder does not compute exactly is refused, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from verifier.checkpoint.model_config import ModelConfig, read_model_config
from verifier.checkpoint.refusals import CheckpointError, NotServedError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
}


def read(folder: Path, config: Any, generation: Any = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


GEMMA4 = {
    **LLAMA,
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 2,
    "use_bidirectional_attention": "vision",
}
MIXTURE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def test_a_mixture_has_a_sound_number_of_experts_and_layers_with_them(tmp_path: Path) -> None:
    assert read(tmp_path, MIXTURE).num_experts == 8
    with pytest.raises(CheckpointError, match="num_experts is over 1000"):
        read(tmp_path, {**MIXTURE, "num_experts": 10**8})
    with pytest.raises(NotServedError, match="odd value"):
        read(tmp_path, {**MIXTURE, "decoder_sparse_step": 0})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "cohere2"}, "type cohere2"),
        ({"model_type": None}, "type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"attention_multiplier": 0.3}, "attention_multiplier"),
        ({"num_key_value_heads": 3}, "4 heads share 3"),
        ({"hidden_act": "relu"}, "relu"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"hidden_size": 72}, "hidden_size 72"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"vocab_size": "97"}, "vocab_size 97"),
        ({"rms_norm_eps": "small"}, "odd value"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "spin": 1}}, "spin"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part"),
        ({"eos_token_id": "end"}, "end"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps 1e-50"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings 2147483648"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert read(tmp_path, LLAMA).hidden_size == 64
    with pytest.raises(NotServedError, match=told):
        read(tmp_path, {**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"enable_moe_block": True, "num_experts": 4}, "num_experts_per_tok None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_scaling"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "has per_layer_config"),
        ({"per_layer_config": {"0": {"head_dim": 48}}}, "heads have different sizes"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 3}}}, "4 heads share 3"),
        ({"global_head_dim": 40}, "head_dim 40"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4"),
        ({"num_kv_shared_layers": 3}, "layers of type full_attention without keys and values"),
        ({"hidden_size_per_layer_input": 20}, "inputs of 20 numbers for each layer, of 97 tokens"),
        ({"vocab_size_per_layer_input": 96}, "inputs of 16 numbers for each layer, of 96 tokens"),
    ],
)
def test_what_gemma4_may_not_be_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    layers = read(tmp_path, GEMMA4).layers
    assert [(layer.head_dim, layer.kv_layer) for layer in layers] == [
        (16, None), (32, None), (16, 0), (32, 1)
    ]  # fmt: skip
    with pytest.raises(NotServedError, match=told):
        read(tmp_path, {**GEMMA4, **changes})


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_a_broken_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("value", [-1, [2, 1 << 32]])
def test_end_tokens_that_no_answer_can_tell_are_refused(value: object, tmp_path: Path) -> None:
    largest = (1 << 32) - 1
    assert read(tmp_path, {**LLAMA, "eos_token_id": largest}).eos_token_ids == {largest}
    if isinstance(value, list):
        with pytest.raises(CheckpointError, match="end tokens"):
            read(tmp_path, LLAMA, {"eos_token_id": value})
    with pytest.raises(CheckpointError, match="end tokens"):
        read(tmp_path, {**LLAMA, "eos_token_id": value})


def test_both_forms_of_rotary_parameters_tell_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 4.0}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", **scaling}}
    new = {
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, **scaling},
    }
    first, second = (read(tmp_path, config).rotaries[0] for config in (old, new))
    assert first.inv_freq.tolist() == second.inv_freq.tolist()
    plain = read(tmp_path, {**LLAMA, "rope_theta": 5e5}).rotaries[0]
    assert (first.inv_freq * 4 == plain.inv_freq).all()


def test_gemma3_has_a_rotary_embedding_per_layer_type(tmp_path: Path) -> None:
    old = {
        **GEMMA3,
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    config = read(tmp_path, old)
    assert [layer.sliding_window for layer in config.layers] == [16, 0, 16, 0]
    full, local = (config.rotaries[config.layers[i].rotary].inv_freq for i in (1, 0))
    # The second of 16 frequencies: theta ** (-2 / 32).
    assert full[1] * 8 == pytest.approx(2e6 ** (-1 / 16), rel=1e-6)
    assert local[1] == pytest.approx(3e3 ** (-1 / 16), rel=1e-6)
    new = {
        **GEMMA3,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        },
    }
    for ours, theirs in zip(read(tmp_path, new).rotaries, config.rotaries, strict=True):
        assert ours.inv_freq.tolist() == theirs.inv_freq.tolist()


def test_softcaps_that_attention_would_ignore_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotServedError, match="attn_logit_softcapping"):
        read(tmp_path, {**GEMMA3, "attn_logit_softcapping": 50.0})
    with pytest.raises(NotServedError, match="later tokens"):
        read(tmp_path, {**GEMMA3, "use_bidirectional_attention": True})
