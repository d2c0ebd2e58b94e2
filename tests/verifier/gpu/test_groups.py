"""Weights in groups, which the decoder for GPUs keeps as codes; on a CPU, in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.gguf.folder import model_folder
from tests.servicekit import gguf_files
from tests.verifier.gpu.running_decoder import CPU, load
from tests.verifier.gpu.test_gpu_model import (
    AddsFewRowsInAnotherOrder,
    CallsItselfStrict,
    check,
    in_one_piece,
)
from tests.verifier.quantized_files import write_quantized
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.config import VerifierConfig
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.weights import GpuWeights
from verifier.model.gpu_model import find_on_gpu, load_on_gpu
from verifier.parity import gpu_check

METHODS = {
    "packed_int4": 128,
    "packed_int4_zeros": 32,
    "packed_int4_channel": 128,
    "gptq_int4": 128,
    "gptq_int4_v2": 128,
    "awq": 64,
}
"""Inputs of a group in memory."""
LAYER = "model.layers.1."
OF_LAYER = [
    [f"self_attn.{name}_proj" for name in "qkv"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


def check_values(weights: GpuWeights, values: dict[str, torch.Tensor], size: int) -> None:
    """Of the last layer, bit by bit, in little memory."""
    assert len(weights.grouped) == 4 * len(weights.layers)
    for weight, names in zip(weights.grouped[-4:], OF_LAYER, strict=True):
        expected = torch.cat([values[f"{LAYER}{name}.weight"] for name in names])
        assert torch.equal(weight.widened(weights.dtype), expected.to(weights.dtype))
        assert (weight.size, weight.codes.nbytes) == (size, expected.numel() // 2)
        assert weight.groups.nbytes == expected.numel() // size * 4


@pytest.mark.parametrize("method", METHODS)
def test_loaded_weights_keep_their_codes_and_have_the_values(method: str, tmp_path: Path) -> None:
    values = write_quantized(tmp_path, method)
    check_values(load(tmp_path), values, METHODS[method])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_so_do_those_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    folder = model_folder(gguf_files.write_model(tmp_path / "a.gguf", name))
    with TensorFiles(folder) as files:
        values = {
            each.name: torch.from_numpy(files.rows(each, 0, each.shape[0]).copy())
            for each in files.tensors.values()
            if each.dtype == name
        }
    check_values(load(folder), values, 32)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("packed_int4", {"dtype": "float32"}),
        ("packed_int4", {"quantization": "fp8"}),
        ("gptq_int8", {}),
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


def loaded(folder: Path, **options: Any) -> Any:
    config = VerifierConfig(model=folder, device="cpu", num_kv_blocks=8, **options)
    described = find_on_gpu(config, CPU)
    assert described is not None
    return load_on_gpu(config, described, CPU)


@pytest.mark.parametrize("method", METHODS)
def test_a_decoder_passes_the_check_and_says_what_it_computes(method: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, method)
    quantization = loaded(tmp_path).dtype.removeprefix("bfloat16, ")
    assert quantization in ("compressed-tensors weights", "gptq weights", "awq weights")
    assert loaded(tmp_path, dtype="float32").dtype == "float32"


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


class AddsFewRowsOfGroupsInAnotherOrder(CallsItselfStrict):
    """Other products are computed row by row."""

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        linear = super().linear
        return torch.cat([linear(row[None], weight, bias) for row in rows])

    def grouped_linear(
        self, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return AddsFewRowsInAnotherOrder().linear(rows, weight.widened(rows.dtype), bias)


@pytest.mark.stand_in
def test_a_strict_decoder_whose_tiles_differ_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "paged_logits", in_one_piece)
    write_quantized(tmp_path, "packed_int4_zeros")
    weights = load(tmp_path, operations=AddsFewRowsOfGroupsInAnotherOrder())
    with pytest.raises(CheckpointError, match="strict: the bits of products depend on rows"):
        check(weights, tmp_path)
