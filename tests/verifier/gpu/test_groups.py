"""Weights in groups, which the decoder for GPUs keeps as codes; on a CPU, in plain torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servicekit.gguf.folder import model_folder
from tests.servicekit import gguf_files
from tests.verifier.gpu.running_decoder import CPU, load
from tests.verifier.gpu.test_gpu_model import (
    AddsFewRowsInAnotherOrder,
    CallsItselfStrict,
    check,
    in_one_piece,
)
from tests.verifier.gpu.weight_forms import form
from tests.verifier.quantized_files import NUM_EXPERTS, compressed_config, write_quantized
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.config import VerifierConfig
from verifier.gpu.groups import Element, GroupedWeight, Offset, WeightForm
from verifier.gpu.weights import Experts, GpuWeights
from verifier.model.gpu_model import find_on_gpu, load_on_gpu
from verifier.parity import gpu_check

METHODS = {
    "packed_int4": form(Element.UINT4, 128, torch.bfloat16, Offset.ZERO),
    "packed_int4_zeros": form(Element.UINT4, 32, torch.bfloat16, Offset.ZERO),
    "packed_int4_channel": form(Element.UINT4, 0, torch.bfloat16, Offset.ZERO),
    "gptq_int4": form(Element.UINT4, 128, torch.float16, Offset.ZERO),
    "gptq_int4_v2": form(Element.UINT4, 0, torch.float16, Offset.ZERO),
    "awq": form(Element.UINT4, 64, torch.float16, Offset.ZERO),
    "packed_int8": form(Element.INT8, 64, torch.bfloat16, Offset.ZERO),
    "int8": form(Element.INT8, 0, torch.bfloat16, Offset.ZERO),
    "gptq_int8": form(Element.INT8, 32, torch.float16, Offset.ZERO),
    "fp8_tensor": form(Element.E4M3, 0, torch.float32, Offset.NONE),
    "fp8_channel": form(Element.E4M3, 0, torch.float32, Offset.NONE),
    "fp8_blocks": form(Element.E4M3, 128, torch.float32, Offset.NONE),
    "fp8_cut_blocks": form(Element.E4M3, 32, torch.float32, Offset.NONE),
}
"""The forms in memory."""
GGUF_TYPES = {
    "Q4_0": form(Element.UINT4, 32, torch.float16, Offset.ZERO),
    "Q4_1": form(Element.UINT4, 32, torch.float16, Offset.MINIMUM),
    "Q5_0": form(Element.INT8, 32, torch.float16, Offset.ZERO),
    "Q5_1": form(Element.INT8, 32, torch.float16, Offset.MINIMUM),
    "Q8_0": form(Element.INT8, 32, torch.float16, Offset.ZERO),
    "Q4_K": form(Element.UINT4, 32, torch.float32, Offset.MINIMUM),
    "Q5_K": form(Element.INT8, 32, torch.float32, Offset.MINIMUM),
    "Q6_K": form(Element.INT8, 16, torch.float32, Offset.NONE),
}
LAYER = "model.layers.1."
OF_LAYER = [
    [f"self_attn.{name}_proj" for name in "qkv"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


def check_weight(weight: GroupedWeight, expected: torch.Tensor, its_form: WeightForm) -> None:
    """Bit by bit, in little memory. Args: expected: float32, of the same shape."""
    assert (weight.form, weight.shape) == (its_form, expected.shape)
    assert torch.equal(weight.widened(torch.bfloat16), expected.bfloat16())
    assert weight.codes.nbytes == expected.numel() // its_form.element.per_byte
    num_groups = expected.numel() // (its_form.group or expected.shape[-1])
    group_bytes = its_form.scale.itemsize * (1 if its_form.offset is Offset.NONE else 2)
    assert weight.groups.nbytes == num_groups * group_bytes


def check_layer(weights: GpuWeights, values: dict[str, torch.Tensor], its_form: WeightForm) -> None:
    """The last one."""
    assert len(weights.grouped) == 4 * len(weights.layers)
    for weight, names in zip(weights.grouped[-4:], OF_LAYER, strict=True):
        expected = torch.cat([values[f"{LAYER}{name}.weight"] for name in names])
        check_weight(weight, expected, its_form)


@pytest.mark.parametrize("method", METHODS)
def test_loaded_weights_keep_their_codes_and_have_the_values(method: str, tmp_path: Path) -> None:
    values = write_quantized(tmp_path, method)
    check_layer(load(tmp_path), values, METHODS[method])


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_so_do_those_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    folder = model_folder(gguf_files.write_model(tmp_path / "a.gguf", name))
    with TensorFiles(folder) as files:
        values = {
            each.name: torch.from_numpy(files.rows(each, 0, each.shape[0]).copy())
            for each in files.tensors.values()
            if each.dtype == name
        }
    check_layer(load(folder), values, GGUF_TYPES[name])


@pytest.mark.parametrize("method", ["awq", "packed_int8", "fp8_channel", "fp8_blocks"])
def test_so_do_those_of_experts(method: str, tmp_path: Path) -> None:
    values = write_quantized(tmp_path, method, model_type="qwen3_moe")
    mlp = load(tmp_path).layers[1].mlp
    assert isinstance(mlp, Experts)
    gate_up, down = mlp.weights.gate_up, mlp.weights.down
    assert isinstance(gate_up, GroupedWeight)
    assert isinstance(down, GroupedWeight)
    of_gate, of_up, of_down = (
        torch.stack([
            values[f"{LAYER}mlp.experts.{expert}.{name}_proj.weight"]
            for expert in range(NUM_EXPERTS)
        ])
        for name in ("gate", "up", "down")
    )  # fmt: skip
    both = torch.cat((of_gate, of_up), dim=1)
    check_weight(gate_up, both, METHODS[method])
    assert torch.equal(gate_up.of_expert(2).widened(torch.float32), both[2])
    # All of an output's 64 inputs are a group.
    assert down.form == dataclasses.replace(METHODS[method], group=0)
    assert torch.equal(down.widened(torch.float32), of_down)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("packed_int4", {"dtype": "float32"}),
        ("packed_int4", {"quantization": "fp8"}),
    ],
)
def test_others_are_widened(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    write_quantized(tmp_path, method)
    assert not load(tmp_path, **options).grouped


def test_modules_of_one_matrix_are_widened_together(tmp_path: Path) -> None:
    values = write_quantized(tmp_path, "awq", plain=("k_proj",))
    weights = load(tmp_path)
    assert len(weights.grouped) == 3 * len(weights.layers)
    expected = torch.cat([values[f"{LAYER}{name}.weight"] for name in OF_LAYER[0]])
    identity = torch.eye(expected.shape[1], dtype=weights.dtype)
    qkv = weights.layers[1].qkv
    assert qkv is not None
    assert torch.equal(qkv(identity).T, expected.to(weights.dtype))


def test_scales_of_float32_are_kept_where_all_of_a_matrix_have_them(tmp_path: Path) -> None:
    values = write_quantized(tmp_path, "packed_int4_zeros")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for module in ("q_proj", "o_proj"):
        name = f"{LAYER}self_attn.{module}.weight"
        # Of more bits than bfloat16 has.
        stored[f"{name}_scale"] = stored[f"{name}_scale"].float() * (1 + 2**-10)
        values[name] *= 1 + 2**-10
    save_file(stored, file, {"format": "pt"})
    weights = load(tmp_path)
    assert len(weights.grouped) == 4 * len(weights.layers) - 1
    output = weights.grouped[-3]
    expected = values[f"{LAYER}self_attn.o_proj.weight"]
    check_weight(output, expected, form(Element.UINT4, 32, torch.float32, Offset.ZERO))
    assert torch.equal(output.widened(torch.float32), expected)


def test_the_last_block_of_fp8_may_be_cut(tmp_path: Path) -> None:
    values = write_quantized(tmp_path, "fp8_blocks", inner=320)
    down = load(tmp_path).grouped[-1]
    its_form = form(Element.E4M3, 64, torch.float32, Offset.NONE)
    check_weight(down, values[f"{LAYER}mlp.down_proj.weight"], its_form)


def test_groups_of_a_matrix_are_as_short_as_its_modules_shortest(tmp_path: Path) -> None:
    write_quantized(tmp_path, "packed_int4_zeros")
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored, content = load_file(file), json.loads(config.read_text())
    groups = content["quantization_config"]["config_groups"]
    groups["group_1"] = compressed_config(4, 128, symmetric=False)["config_groups"]["group_0"]
    config.write_text(json.dumps(content))
    for part in ("weight_scale", "weight_zero_point"):
        name = f"{LAYER}self_attn.k_proj.{part}"
        stored[name] = stored[name][:, :2].contiguous()
    save_file(stored, file, {"format": "pt"})
    names = [f"{LAYER}{name}.weight" for name in OF_LAYER[0]]
    with TensorFiles(tmp_path) as files:
        tensors = [files.tensors[name] for name in names]
        rows = [torch.from_numpy(files.rows(each, 0, each.shape[0])) for each in tensors]
    check_weight(load(tmp_path).grouped[-4], torch.cat(rows), METHODS["packed_int4_zeros"])


def loaded(folder: Path, **options: Any) -> Any:
    config = VerifierConfig(model=folder, device="cpu", num_kv_blocks=8, **options)
    described = find_on_gpu(config, CPU)
    assert described is not None
    return load_on_gpu(config, described, CPU)


@pytest.mark.parametrize(
    ("method", "model_type"),
    [*((method, "llama") for method in METHODS), ("awq", "qwen3_moe"), ("fp8_blocks", "qwen3_moe")],
)
def test_a_decoder_passes_the_check_and_says_what_it_computes(
    method: str, model_type: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, method, model_type=model_type)
    quantization = loaded(tmp_path).dtype.removeprefix("bfloat16, ")
    assert quantization in (
        "compressed-tensors weights",
        "gptq weights",
        "awq weights",
        "fp8 weights",
    )
    assert loaded(tmp_path, dtype="float32").dtype == "float32"


@pytest.mark.parametrize(("name", "num_experts"), [("Q4_K", 0), ("Q6_K", 0), ("Q5_1", 4)])
def test_so_does_one_of_a_gguf_file(name: str, num_experts: int, tmp_path: Path) -> None:
    file = gguf_files.write_model(tmp_path / "a.gguf", name, num_experts=num_experts)
    assert loaded(model_folder(file), dtype="bfloat16").dtype == "bfloat16, gguf weights"


def test_a_decoder_that_computes_other_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(tmp_path, "gptq_int4")
    fill = GroupedWeight.fill

    def filled(self: GroupedWeight, *arguments: Any) -> None:
        fill(self, *arguments)
        self.groups[..., 1] += 1

    monkeypatch.setattr(GroupedWeight, "fill", filled)
    with pytest.raises(CheckpointError, match="not computed as transformers computes it"):
        loaded(tmp_path)


class AddsRowByRow(CallsItselfStrict):
    """Strict in fact."""

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        linear = super().linear
        return torch.cat([linear(row[None], weight, bias) for row in rows])


class AddsFewRowsOfGroupsInAnotherOrder(AddsRowByRow):
    def grouped_linear(
        self, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return AddsFewRowsInAnotherOrder().linear(rows, weight.widened(rows.dtype), bias)


@pytest.mark.stand_in
@pytest.mark.parametrize("method", ["packed_int4_zeros", "fp8_channel", "fp8_blocks"])
def test_a_strict_decoder_whose_tiles_differ_is_refused(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "paged_logits", in_one_piece)
    write_quantized(tmp_path, method)
    check(load(tmp_path, operations=AddsRowByRow()), tmp_path)
    weights = load(tmp_path, operations=AddsFewRowsOfGroupsInAnotherOrder())
    with pytest.raises(CheckpointError, match="strict: the bits of products depend on rows"):
        check(weights, tmp_path)
