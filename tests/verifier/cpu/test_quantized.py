"""Quantised safetensors checkpoints: values by a formula, logits by transformers with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from servicekit.config import ConfigError
from tests.verifier.cpu.running_decoder import load, logits_of
from tests.verifier.quantized_files import METHODS, VOCABULARY, packed, write_quantized
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.checkpoint.weight_types import WeightType, widened
from verifier.config import VerifierConfig
from verifier.cpu.decoder import CpuDecoder
from verifier.model import own_model
from verifier.model.own_model import find_own, load_own
from verifier.parity.comparison import paged_logits

LAYER = "model.layers.1.mlp.down_proj"


def test_the_packing_of_these_tests_is_that_of_compressed_tensors() -> None:
    numbers = np.array([[-8, -7, -3, 0, 1, 2, 6, 7]])
    assert packed(numbers + 8, 4).view(torch.uint32).tolist() == [[0xFEA98510]]
    assert packed(np.array([[1, 2, 3, 255]]), 8).view(torch.uint32).tolist() == [[0xFF030201]]


@pytest.mark.parametrize("method", METHODS)
def test_values_are_bit_equal_to_the_formula(method: str, tmp_path: Path) -> None:
    expected = write_quantized(tmp_path, method)
    with TensorFiles(tmp_path) as files:
        assert files.tensors.keys() == expected.keys()
        for name, values in expected.items():
            tensor = files.tensors[name]
            assert tensor.shape == values.shape
            rows = widened(files.rows(tensor, 0, tensor.shape[0]), tensor.type)
            own = torch.from_numpy(rows.reshape(tensor.shape).copy())
            assert torch.equal(own.view(torch.int32), values.view(torch.int32))
        # From a row in the middle of what is packed together.
        own = torch.from_numpy(files.rows(files.tensors[f"{LAYER}.weight"], 13, 30))
        assert torch.equal(own, expected[f"{LAYER}.weight"][13:43])
        del rows


@pytest.mark.parametrize(
    ("method", "model_type", "plain"),
    [
        *((method, "llama", ()) for method in METHODS),
        ("fp8_channel", "llama", ("k_proj", "layers.1.mlp.down_proj")),
        ("fp8_blocks", "qwen3", ()),
        ("packed_int4_zeros", "qwen3_moe", ("k_proj",)),
        ("fp8_channel", "qwen3_moe", ()),
        ("fp8_channel", "gemma4_text", ("tokens_per_layer",)),
        ("packed_int4", "gemma4_text", ("o_proj",)),
        ("packed_int4", "qwen3", ("k_proj", "gate_proj", "layers.1.mlp.down_proj")),
    ],
)
def test_logits_are_transformers_with_the_values(
    method: str, model_type: str, plain: tuple[str, ...], tmp_path: Path
) -> None:
    values = write_quantized(tmp_path, method, model_type=model_type, plain=plain)
    text = [(7 * i) % VOCABULARY for i in range(40)]
    whole = logits_of(load(tmp_path, "float32"), text)
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(
        None, config=config, state_dict=values, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        exact = model(torch.tensor([text])).logits[0].numpy()
    np.testing.assert_allclose(whole, exact, rtol=0, atol=2e-4 * float(np.abs(exact).max()))


def _change(options: dict[str, Any], path: str, value: Any) -> None:
    *parts, key = path.split(".")
    for part in parts:
        options = options[part]
    options[key] = value


@pytest.mark.parametrize(
    ("method", "path", "value"),
    [
        ("packed_int4", "quant_method", "bitsandbytes"),
        ("packed_int4", "format", "marlin-24"),
        ("packed_int4", "quant_method", ["awq"]),
        ("packed_int4", "quantization_status", "initialized"),
        ("packed_int4", "kv_cache_scheme", {"num_bits": 8}),
        ("packed_int4", "transform_config", {"config_groups": {"R1": {}}}),
        ("packed_int4", "sparsity_config", {"format": "sparse-24-bitmask"}),
        ("packed_int4", "unheard_of", 1),
        ("packed_int4", "config_groups", []),
        ("packed_int4", "config_groups.group_0.format", "nvfp4-pack-quantized"),
        ("packed_int4", "config_groups.group_0.input_activations", {"num_bits": 8}),
        ("packed_int4", "config_groups.group_0.output_activations", {"num_bits": 8}),
        ("packed_int4", "config_groups.group_0.weights", None),
        ("packed_int4", "config_groups.group_0.weights.num_bits", 3),
        ("packed_int4", "config_groups.group_0.weights.actorder", "group"),
        ("packed_int4", "config_groups.group_0.weights.strategy", "tensor_group"),
        ("packed_int4", "config_groups.group_0.weights.type", "uint"),
        ("packed_int4", "config_groups.group_0.weights.group_size", 48),
        ("packed_int4", "config_groups.group_0.weights.group_size", None),
        ("gptq_int4", "bits", 3),
        ("gptq_int4", "checkpoint_format", "marlin"),
        ("gptq_int4", "dynamic", {"-:lm_head": {}}),
        ("gptq_int4", "group_size", 16),
        ("gptq_int4", "is_marlin_format", True),
        ("awq", "version", "gemv"),
        ("fp8_blocks", "fmt", "e5m2"),
        ("fp8_blocks", "weight_block_size", [128, 100]),
        ("fp8_blocks", "activation_scheme", "odd"),
        ("fp8_channel", "config_groups.group_0.weights.strategy", "group"),
        ("fp8_channel", "config_groups.group_0.weights.num_bits", 4),
        ("fp8_cut_blocks", "config_groups.group_0.weights.block_structure", None),
        ("awq", "backend", "llm-awq"),
        ("awq", "zero_point", False),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(
    method: str, path: str, value: Any, tmp_path: Path
) -> None:
    write_quantized(tmp_path, method)
    config = json.loads((tmp_path / "config.json").read_text())
    _change(config, f"quantization_config.{path}", value)
    (tmp_path / "config.json").write_text(json.dumps(config))
    key = path.rpartition(".")[2]
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: .*{key}\b"):
        describe_decoder(tmp_path)


@pytest.mark.parametrize(
    ("method", "name", "tensor", "reason"),
    [
        ("packed_int4", "weight_scale", None, "4 bits in groups of 128, or a tensor beside it"),
        ("packed_int4", "weight_scale", torch.ones(256, 4), "4 bits in groups of 128"),
        ("packed_int4", "weight_shape", torch.tensor([256, 383]), "4 bits in groups of 128"),
        ("packed_int4", "weight_zero_point", torch.ones(256, 3), "4 bits in groups of 128"),
        ("packed_int4", "weight_g_idx", torch.arange(384) % 3, "weight_g_idx: .*actorder"),
        ("packed_int4", "weight", torch.ones(256, 384), "weight: is there beside"),
        ("int8", "weight_scale", torch.ones(256, 3), "8 bits in groups of a row"),
        ("gptq_int4", "qzeros", None, "4 bits in groups of 128"),
        ("gptq_int4", "g_idx", torch.arange(384) % 3, "g_idx: .*desc_act"),
        ("awq", "scales", torch.ones(6, 128), "4 bits in groups of 64"),
        ("fp8_tensor", "weight_scale", None, "no scales"),
        ("fp8_channel", "weight_scale", torch.ones(256, 2), "no scales"),
        ("fp8_blocks", "weight_scale_inv", torch.ones(2, 2), "no scales"),
    ],
)
def test_tensors_that_are_not_as_told_are_refused_by_name(
    method: str, name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, method)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(f"{LAYER}.{name}", None)
    if tensor is not None:
        tensors[f"{LAYER}.{name}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{LAYER}\..*weight.*{reason}|{LAYER}\.{reason}"):
        describe_decoder(tmp_path)


def test_a_trivial_order_of_the_inputs_is_served(tmp_path: Path) -> None:
    write_quantized(tmp_path, "packed_int4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}.weight_g_idx"] = torch.arange(384, dtype=torch.int32) // 128
    save_file(tensors, tmp_path / "model.safetensors")
    assert describe_decoder(tmp_path).stored_type is WeightType.GROUPS


def test_a_bias_is_overlooked_only_if_it_is_zero(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq_int4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}.bias"] = torch.zeros(256)
    save_file(tensors, tmp_path / "model.safetensors")
    assert describe_decoder(tmp_path).quantization == "gptq"
    tensors[f"{LAYER}.bias"][7] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(NotServedError, match=f"{LAYER}.bias, which has no known use"):
        describe_decoder(tmp_path)


def test_a_configuration_of_quantised_weights_without_any_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "packed_int4", plain=("proj",))
    with pytest.raises(CheckpointError, match="no weights of the quant_method compressed-tensors"):
        describe_decoder(tmp_path)


@pytest.mark.parametrize(
    ("method", "model_type", "plain"),
    [("packed_int4_zeros", "qwen3_moe", ("v_proj",)), ("fp8_tensor", "llama", ())],
)
def test_a_model_is_checked_at_load_and_tells_its_format(
    method: str,
    model_type: str,
    plain: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_quantized(tmp_path / "model", method, model_type=model_type, plain=plain)
    monkeypatch.setattr(own_model, "_cache_folder", lambda: tmp_path)
    config = VerifierConfig(model=tmp_path / "model", device="cpu", num_kv_blocks=8)
    described = find_own(config)
    assert described is not None
    ready = load_own(config, described)
    assert ready.dtype == f"bfloat16, {described.quantization} weights"
    assert isinstance(ready.model, CpuDecoder)
    # Greedy: each token is the next of the text that it ends.
    text = [5]
    for _ in range(20):
        text.append(int(paged_logits(ready.model, text, [], block_size=16)[-1].argmax()))
    whole = paged_logits(ready.model, text, list(range(1, len(text))), block_size=16)
    assert whole.argmax(axis=-1).tolist()[:-1] == text[1:]
    ready.model.close()


def test_fp8_is_not_quantised_again(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8_channel")
    config = VerifierConfig(model=tmp_path, device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="--quantization: fp8: the checkpoint's weights are FP8"):
        find_own(config)


def test_fp8_is_computed_in_groups_only_where_scales_or_layers_differ(tmp_path: Path) -> None:
    for method, plain, expected in (
        ("fp8_tensor", (), WeightType.FP8),
        ("fp8_channel", (), WeightType.FP8),
        ("fp8_channel", ("k_proj",), WeightType.GROUPS),
        ("fp8_blocks", (), WeightType.GROUPS),
    ):
        write_quantized(tmp_path, method, plain=plain)
        assert describe_decoder(tmp_path).stored_type is expected
