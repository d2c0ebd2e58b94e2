"""Gemma 4 and OLMo 3 from GGUF files: as llama.cpp converts transformers' checkpoints.

https://github.com/ggml-org/llama.cpp, `conversion/gemma.py` and `conversion/olmo.py`: which layers
slide is a list; what differs between layers is one, too; Gemma 4's full layers have factors for
their rotary embeddings.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from servicekit.gguf.config import config_of
from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError, read_header
from tests.servicekit.gguf_files import (
    END,
    TOKENS,
    TOOL,
    VOCABULARY,
    add_byte_level_vocabulary,
)
from tests.verifier.cpu.numpy_decoder import all_logits
from tests.verifier.cpu.running_decoder import load, logits_of
from tests.verifier.cpu.test_loader import CONFIGS, GEMMA4, TEXT, reference, save
from verifier.parity.reference import reference as parity_reference

ARCHITECTURES = {
    "gemma4": "gemma4", "gemma4_dense": "gemma4", "gemma4_mixture": "gemma4", "olmo3": "olmo2",
}  # fmt: skip
_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
# Whose names have no module before them, or another one.
_OTHERS = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def converted(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    own = ".".join(parts[2:] if prefix else parts)
    if own in _OTHERS:
        return prefix + _OTHERS[own]
    module, _, suffix = own.rpartition(".")
    return f"{prefix}{_NAMES[module]}.{suffix}"


def numbers_of(name: str, config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": GEMMA4["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
    }
    if name == "olmo3":
        return numbers | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": 1.25,
        }
    for size, suffix in ((GEMMA4["global_head_dim"], ""), (GEMMA4["head_dim"], "_swa")):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            numbers[key + suffix] = size
    num_shared = config.num_kv_shared_layers
    numbers["attention.shared_kv_layers"] = num_shared
    numbers["embedding_length_per_layer_input"] = config.hidden_size_per_layer_input or 0
    numbers["final_logit_softcapping"] = config.final_logit_softcapping
    if config.use_double_wide_mlp:
        numbers["feed_forward_length"] = [config.intermediate_size] * (
            config.num_hidden_layers - num_shared
        ) + [2 * config.intermediate_size] * num_shared
    if config.attention_k_eq_v:
        numbers["attention.head_count_kv"] = [2 if slide else 1 for slide in slides]
    if config.enable_moe_block:
        numbers["expert_count"] = config.num_experts
        numbers["expert_used_count"] = config.top_k_experts
        numbers["expert_feed_forward_length"] = config.moe_intermediate_size
    return numbers


def write(folder: Path, name: str, changed: Mapping[str, Any] | None = None) -> Path:
    """A model of `CONFIGS`, as a file of float32; `changed`: None takes a key out."""
    config = CONFIGS[name]()
    save(folder / "saved", name)
    path = folder / "file" / "model.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    for key, value in {**numbers_of(name, config), **(changed or {})}.items():
        full = f"{ARCHITECTURES[name]}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    tensors = {
        converted(each): tensor.numpy()
        for each, tensor in load_file(folder / "saved" / "model.safetensors").items()
    }
    if name != "olmo3":
        size = GEMMA4["global_head_dim"]
        factor = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        factors = np.full(size // 2, 1e30, dtype=np.float32)
        factors[: int(size * factor / 2)] = 1.0
        tensors["rope_freqs.weight"] = factors
    for own, values in tensors.items():
        if own not in (changed or {}):
            writer.add_tensor(own, values)
    add_byte_level_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def vocabularies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the files' size."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ARCHITECTURES:
        config = CONFIGS[name]()
        config.vocab_size = VOCABULARY
        if getattr(config, "vocab_size_per_layer_input", 0):
            config.vocab_size_per_layer_input = VOCABULARY + 2
        if name == "olmo3":
            config.rope_parameters["full_attention"]["attention_factor"] = 1.25
        monkeypatch.setitem(CONFIGS, name, lambda config=config: config)


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


def test_what_ends_calls_of_gemma4_is_an_end_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servicekit.gguf.config._TOOL_RESPONSE", TOKENS[TOOL])
    folder = model_folder(write(tmp_path, "gemma4_dense"))
    assert json.loads((folder / "config.json").read_bytes())["eos_token_id"] == [END, TOOL]


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("gemma4", {"block_count": 0}, "block_count: 0 layers"),
        ("gemma4", {"attention.sliding_window_pattern": [True]}, "window_pattern: does not"),
        ("gemma4", {"rope.dimension_count": 24}, "rope.dimension_count: 24 is not"),
        ("gemma4", {"attention.shared_kv_layers": 6}, "shared_kv_layers: 6 of"),
        ("gemma4", {"feed_forward_length": [40] * 5 + [41]}, "feed_forward_length: MLPs of"),
        ("gemma4", {"feed_forward_length": [40]}, "is no number, and no list"),
        ("gemma4_dense", {"attention.head_count_kv": [1, 2, 2]}, "head_count_kv: layers of one"),
        ("gemma4", {"rope_freqs.weight": None}, "rope_freqs.weight: is missing"),
        ("gemma4", {"per_layer_token_embd.weight": None}, "per_layer_token_embd"),
        ("gemma4", {"attention.head_count_kv": [2, 1] * 3}, "head_count_kv: 1 heads with values"),
        ("olmo3", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier: 0.1"),
    ],
)  # fmt: skip
def test_what_no_such_model_has_is_refused_by_its_key(
    name: str, changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufError, match=words):
        model_folder(write(tmp_path, name, changed))


@pytest.mark.parametrize("name", ["gemma4", "olmo3"])
def test_values_of_another_kind_are_read_or_refused_and_end_nothing(
    name: str, tmp_path: Path
) -> None:
    header = read_header(write(tmp_path, name))
    factors = {} if name == "olmo3" else {"rope_freqs.weight": np.ones(24, dtype=np.float32)}
    odd: list[Any] = [
        *(np.array(each) for each in ([], [1, 2], [0.5, 2.5], [True, False], [2**63] * 6)),
        ["a", "b"], "text", 0, 1, -1, 2**63, 0.5, True,
    ]  # fmt: skip
    keys = [*header.metadata, f"{ARCHITECTURES[name]}.expert_count"]
    refusals = []
    for key, value in itertools.product(keys, odd):
        if key == "general.architecture":
            continue
        changed = dataclasses.replace(header, metadata={**header.metadata, key: value})
        try:
            config = config_of(changed, factors)
        except GgufError as error:
            refusals.append(str(error))
            continue
        assert json.dumps(config)
    assert refusals
    assert all(each.startswith(str(header.path)) for each in refusals)
    empty = {"rope_freqs.weight": np.ones(0, dtype=np.float32)}
    if name == "gemma4":
        metadata = {**header.metadata, "gemma4.attention.key_length": 0}
        for same in ("attention.value_length", "rope.dimension_count"):
            metadata[f"gemma4.{same}"] = 0
        with pytest.raises(GgufError, match=r"rope_freqs\.weight"):
            config_of(dataclasses.replace(header, metadata=metadata), empty)
