"""Gated delta nets from GGUF files: as llama.cpp converts transformers' checkpoints.

https://github.com/ggml-org/llama.cpp, `conversion/qwen.py`: norms get 1 more, decays are minus
exponentials, value heads of one key head are apart (but of qwen3next), and what qwen3next has in
one matrix by key heads is apart.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError
from tests.servicekit.gguf_files import (
    ALL_TYPES,
    VOCABULARY,
    add_byte_level_vocabulary,
    write_model,
)
from tests.verifier.cpu.numpy_decoder import all_logits
from tests.verifier.cpu.running_decoder import load, logits_of
from tests.verifier.cpu.test_loader import CONFIGS, TEXT, reference, save
from verifier.checkpoint.description import describe_decoder
from verifier.parity.comparison import probe_text
from verifier.parity.reference import reference as parity_reference

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip


def by_turns(tensor: torch.Tensor, config: Any, size: int, first: int = 0, dim: int = 0) -> Any:
    """Value heads of `size` from `first` on in the order of turns."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    order = [g * (values // keys) + j for j in range(values // keys) for g in range(keys)]
    index = [first + head * size + i for head in order for i in range(size)]
    return tensor.index_select(dim, torch.tensor([*range(first), *index]))


def converted(name: str, tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    takes_turns, size = name != "qwen3_next", config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for full in sorted(tensors):
        tensor, parts = tensors[full], full.removeprefix("model.").split(".")
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        own = ".".join(parts[2:-1] if prefix else parts[:-1])
        if own.endswith("norm") and own != "linear_attn.norm":
            tensor = tensor + 1
        if takes_turns and own.startswith("linear_attn"):
            if own.endswith(("qkv", "conv1d")):
                tensor = by_turns(tensor, config, size, 2 * keys)
            elif own.endswith("in_proj_z"):
                tensor = by_turns(tensor, config, size)
            elif own.endswith("out_proj"):
                tensor = by_turns(tensor, config, size, dim=1)
            elif own.endswith(("_a", "_b")) or parts[-1] in ("A_log", "dt_bias"):
                tensor = by_turns(tensor, config, 1)
        if parts[-1] == "A_log":
            result[prefix + "ssm_a"] = -torch.exp(tensor)
        elif parts[-1] == "dt_bias":
            result[prefix + "ssm_dt.bias"] = tensor
        elif ".experts." in full:
            experts.setdefault(f"{prefix}ffn_{parts[-2][:-5]}_exps.weight", []).append(tensor)
        elif own.endswith("in_proj_qkvz"):
            heads = tensor.reshape(config.linear_num_key_heads, -1, tensor.shape[1])
            values = config.linear_num_value_heads // config.linear_num_key_heads * size
            sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values, values]
            q, k, v, z = (part.flatten(0, 1) for part in heads.split(sizes, dim=1))
            result[prefix + "attn_qkv.weight"] = torch.cat((q, k, v))
            result[prefix + "attn_gate.weight"] = z
        else:
            stored = tensor.squeeze() if "conv1d" in own or "expert_gate" in own else tensor
            result[f"{prefix}{_NAMES[own]}.{parts[-1]}"] = stored
    # Experts were sorted as texts; there are fewer than ten.
    return result | {each: torch.stack(all_) for each, all_ in experts.items()}


def write(folder: Path, name: str, **changed: Any) -> Path:
    """A model of `CONFIGS`, as a file of float32."""
    config = CONFIGS[name]()
    save(folder / "saved", name)
    path = folder / "file" / "model.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(
            config.head_dim * config.rope_parameters["partial_rotary_factor"]
        ),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }
    if getattr(config, "intermediate_size", None):
        numbers["feed_forward_length"] = config.intermediate_size
    if "moe" in name or "next" in name:
        numbers["expert_count"] = config.num_experts
        numbers["expert_used_count"] = config.num_experts_per_tok
        numbers["expert_feed_forward_length"] = config.moe_intermediate_size
        shared = config.shared_expert_intermediate_size
        numbers["expert_shared_feed_forward_length"] = shared
    for key, number in (numbers | changed).items():
        full = f"{ARCHITECTURES[name]}.{key}"
        if isinstance(number, list):
            writer.add_array(full, number)
        else:
            writer.add_uint32(full, number)
    writer.add_float32(f"{ARCHITECTURES[name]}.attention.layer_norm_rms_epsilon", 1e-6)
    theta = config.rope_parameters["rope_theta"]
    writer.add_float32(f"{ARCHITECTURES[name]}.rope.freq_base", theta)
    tensors = load_file(folder / "saved" / "model.safetensors")
    for own, tensor in converted(name, tensors, config).items():
        writer.add_tensor(own, tensor.numpy())
    add_byte_level_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def plain_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the format has a place for."""

    def changed(name: str, **values: Any) -> Any:
        config = CONFIGS[name]()
        for key, value in {**values, "vocab_size": VOCABULARY}.items():
            setattr(config, key, value)
        return config

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    configs = {
        "qwen3_next": changed("qwen3_next", mlp_only_layers=[], norm_topk_prob=True),
        "qwen3_5": changed(
            "qwen3_5", layer_types=kinds, attention_bias=False, linear_num_key_heads=2
        ),
        "qwen3_5_moe": changed("qwen3_5_moe"),
    }
    for name, config in configs.items():
        monkeypatch.setitem(CONFIGS, name, lambda config=config: config)


@pytest.mark.usefixtures("plain_configs")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = model_folder(write(tmp_path, name))
    expected = reference(tmp_path / "saved")
    weights = load(folder, "float32")
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(all_logits(weights, TEXT), expected, atol=1e-4 * largest)
    np.testing.assert_allclose(logits_of(weights, TEXT), expected, atol=1e-4 * largest)
    exact, _ = parity_reference(folder, dtype=torch.float32, quantization="none", rounds_kv=True)
    assert torch.isfinite(exact).all()


@pytest.mark.usefixtures("plain_configs")
def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5", block_count=5, nextn_predict_layers=1,
                 **{"rope.dimension_sections": [2, 1, 1, 0]})  # fmt: skip
    assert len(describe_decoder(model_folder(path)).config.layers) == 4


@pytest.mark.usefixtures("plain_configs")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nextn_predict_layers": 9}, "nextn_predict_layers: 9 of 4"),
        ({"ssm.inner_size": 130}, "ssm.inner_size: 130 of 4 heads"),
    ],
)
def test_odd_sizes_are_refused_by_their_key(
    changed: dict[str, int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufError, match=words):
        model_folder(write(tmp_path, "qwen3_5", **changed))


@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
def test_quantised_files_are_computed_as_their_values(architecture: str, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "all.gguf", ALL_TYPES, architecture=architecture,
        num_experts=0 if architecture == "qwen35" else 4,
    )  # fmt: skip
    folder = model_folder(path)
    weights = load(folder, "float32")
    assert weights.delta is not None
    assert weights.delta.takes_turns == (architecture != "qwen3next")
    exact, _ = parity_reference(folder, dtype=torch.float32, quantization="none", rounds_kv=True)
    text = probe_text(vocab_size=weights.vocab_size, max_model_len=512)
    # Activations are rounded, too.
    np.testing.assert_allclose(
        logits_of(weights, text), exact.numpy(), rtol=0, atol=1e-3 * float(exact.abs().max())
    )
