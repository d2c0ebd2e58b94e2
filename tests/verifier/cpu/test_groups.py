"""Weights in groups: values, products, and a model's logits, by `gguf`, numpy and transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from servicekit.gguf.folder import model_folder
from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import address_of
from tests.servicekit.gguf_files import ALL_TYPES, VOCABULARY, some_rows, write_model
from tests.verifier.cpu.running_decoder import load, logits_of
from verifier.checkpoint.group_formats import FORMATS, GROUP, GroupedRows, take_apart, values_of
from verifier.checkpoint.tensor_files import TensorFiles
from verifier.cpu.group_packing import num_records, pack_groups
from verifier.cpu.kernels.group_panels import rounded_row_bytes
from verifier.cpu.kernels.group_records import NUMBERS, record_bytes
from verifier.cpu.kernels.group_tiles import group_tile, group_values
from verifier.cpu.kernels.products import round_rows
from verifier.cpu.processor import TILES
from verifier.parity.reference import reference

Array = npt.NDArray[np.float32]
OUTPUTS, DEPTH = 40, 512
# Longer than windows of test models.
TEXT = [(7 * i) % VOCABULARY for i in range(40)]


@kernel
def _multiply(
    form: int, count: int, x: int, x_row: int, panel: int, first_row: int, num_rows: int, w: int,
    block_bytes: int, num_blocks: int, depth: int, out: int, out_row: int,
) -> None:  # fmt: skip
    for block in range(num_blocks):
        group_tile(form, count, x + first_row * x_row, x_row, panel, first_row, num_rows,
                   w + block * block_bytes, depth, out + 64 * block, out_row)  # fmt: skip


@kernel
def _values(form: int, w: int, lane: int, depth: int, out: int) -> None:
    group_values(form, w, lane, depth, np.float32(1.0), out)


def _rounded(x: Array) -> npt.NDArray[np.uint8]:
    """The panel of the rows."""
    num_rows, depth = x.shape
    panel = np.zeros(num_rows * rounded_row_bytes(depth), dtype=np.uint8)
    round_rows(address_of(x), x.strides[0], 0, 2, num_rows, depth, address_of(panel))
    round_rows(address_of(x), x.strides[0], 2, num_rows, num_rows, depth, address_of(panel))
    return panel


def _scaled(panel: npt.NDArray[np.uint8], num_rows: int, depth: int) -> npt.NDArray[np.float64]:
    """What a panel's rows stand for."""
    codes, factors = np.split(panel, [2 * num_rows * depth])
    values = codes.view(np.int16).reshape(-1, num_rows, GROUP).astype(np.float64)
    values *= factors.view(np.float32).reshape(-1, num_rows, 2)[..., :1]
    return values.transpose(1, 0, 2).reshape(num_rows, depth)


def _some_parts(name: str, draw: np.random.Generator) -> tuple[GroupedRows, Array]:
    """Rows, and their values by GGUF's package or by the formula."""
    if name == "FP8":
        factors = draw.normal(0, 0.01, (OUTPUTS, DEPTH // GROUP)).astype(np.float32)
        numbers = torch.from_numpy(draw.normal(0, 60, (OUTPUTS, DEPTH)))
        floats = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = GroupedRows(codes=floats.view(torch.uint8).numpy(), factors=factors)
        return parts, floats.float().numpy() * factors.repeat(GROUP, axis=1)
    if not FORMATS[name].has_zeros:
        rows = some_rows(name, (OUTPUTS, DEPTH), draw)
        if name == "MXFP4":
            # Powers of two that have no float32 of full precision, and far ones.
            rows[:6, 0] = 0, 1, 2, 3, 100, 130
            rows[:, 1:17] = draw.integers(0, 256, (OUTPUTS, 16))
        return take_apart(name, rows), gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    low, high = (-128, 128) if name == "INT8" else (0, 16)
    codes = draw.integers(low, high, (OUTPUTS, DEPTH))
    zeros = draw.integers(low, high, (OUTPUTS, DEPTH // GROUP))
    factors = draw.normal(0, 0.01, zeros.shape).astype(np.float32)
    values = factors.repeat(GROUP, axis=1) * (codes - zeros.repeat(GROUP, axis=1)).astype(
        np.float32
    )
    parts = GroupedRows(codes=codes.astype(np.uint8), factors=factors, zeros=zeros.astype(np.int8))
    return parts, values


def _packed(name: str, parts: GroupedRows) -> npt.NDArray[np.uint8]:
    shape = -(-OUTPUTS // 16), num_records(name, DEPTH), record_bytes(FORMATS[name])
    blocks = np.zeros(shape, dtype=np.uint8)
    pack_groups(name, parts, blocks)
    return blocks


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_bit_equal_to_the_oracles(name: str) -> None:
    parts, expected = _some_parts(name, np.random.default_rng(1))
    np.testing.assert_array_equal(values_of(name, parts).view(np.int32), expected.view(np.int32))
    if name == "FP8":
        return  # of which there are no embeddings
    blocks = _packed(name, parts)
    for output in (0, 15, 16, OUTPUTS - 1):
        own = np.zeros(DEPTH, dtype=np.float32)
        block = address_of(blocks) + output // 16 * blocks.strides[0]
        _values(NUMBERS[name], block, output % 16, DEPTH, address_of(own))
        np.testing.assert_array_equal(own.view(np.int32), expected[output].view(np.int32))


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_the_values_sums_and_do_not_depend_on_the_other_rows(name: str) -> None:
    draw = np.random.default_rng(2)
    parts, expected = _some_parts(name, draw)
    x = draw.standard_normal((TILES.max_group_rows, DEPTH)).astype(np.float32)
    x[:, 7] *= 300
    panel = _rounded(x)
    blocks = _packed(name, parts)
    values = expected.astype(np.float64)

    def products(first: int, count: int) -> Array:
        out = np.full((count, 48), 7, dtype=np.float32)
        _multiply(NUMBERS[name], count, address_of(x), x.strides[0], address_of(panel), first,
                  len(x), address_of(blocks), blocks.strides[0], len(blocks), DEPTH,
                  address_of(out), out.strides[0])  # fmt: skip
        return out

    together = products(0, len(x))
    exact = (x if name == "FP8" else _scaled(panel, len(x), DEPTH)) @ values.T
    np.testing.assert_allclose(
        together[:, :OUTPUTS], exact, rtol=0, atol=2e-6 * float(np.abs(exact).max())
    )
    assert not together[:, OUTPUTS:].any()
    for count in range(1, len(x)):
        np.testing.assert_array_equal(products(1, count), together[1 : count + 1])


def test_rows_are_rounded_to_16_bits_and_keep_what_is_not_finite() -> None:
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    x[1, :32], x[2, 3], x[3, 40], x[4, :32] = 0, np.nan, -np.inf, 1e-38
    scaled = _scaled(_rounded(x), 5, 64)
    for row in (0, 1, 4):
        largest = np.abs(x[row]).reshape(2, 32).max(axis=1).repeat(32)
        assert (np.abs(scaled[row] - x[row]) <= largest / 32767 * 0.51 + 1e-37).all()
    assert np.isnan(scaled[2, :32]).all()
    assert np.isfinite(scaled[2, 32:]).all()
    assert np.isnan(scaled[3, 32:]).all()


@pytest.mark.parametrize(
    ("architecture", "num_experts"),
    [("llama", 0), ("qwen2", 0), ("qwen3", 0), ("gemma2", 0), ("gemma3", 0), ("phi3", 0),
     ("qwen3moe", 4)],
)  # fmt: skip
def test_logits_are_transformers_by_its_own_reading_of_the_file(
    tmp_path: Path, architecture: str, num_experts: int
) -> None:
    """Its reading turns the llama family's paired rows of Q and K back by itself.

    Not of the metadata: sizes that it does not read it replaces by defaults.
    """
    path = tmp_path / "mixed.gguf"
    folder = model_folder(write_model(path, ALL_TYPES, architecture=architecture,
                                      num_experts=num_experts))  # fmt: skip
    whole = _logits(folder)
    # Types of weights that transformers reads, with the same name for the file.
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, config=AutoConfig.from_pretrained(folder),
        dtype=torch.float32, attn_implementation="eager",
    )  # fmt: skip
    _check_logits(whole, model)
    # So the check at load compares with the same model.
    exact, _ = reference(folder, dtype=torch.float32, quantization="none", rounds_kv=False)
    assert torch.isfinite(exact).all()


@pytest.mark.parametrize(
    ("architecture", "num_experts"), [("llama", 4), ("granite", 0), ("smollm3", 0), ("olmo2", 0)]
)
def test_logits_are_transformers_with_the_values_of_files_that_no_library_reads(
    tmp_path: Path, architecture: str, num_experts: int
) -> None:
    # Mixtral's router too, whose products take no rounded rows.
    path = write_model(tmp_path / "a.gguf", "Q8_0", architecture=architecture,
                       num_experts=num_experts)  # fmt: skip
    folder = model_folder(path)
    names = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
    with TensorFiles(folder) as files:
        # All but the experts is as in other models.
        state = {
            name: torch.from_numpy(np.array(files.rows(tensor, 0, tensor.shape[0]))).reshape(
                tensor.shape
            )
            for name, tensor in files.tensors.items()
            if ".experts." not in name
        }
    for tensor in gguf.GGUFReader(path).tensors:
        _, layer, part, *_ = [*tensor.name.split("."), "", ""]
        if part in names:
            for expert, values in enumerate(gguf.dequantize(tensor.data, tensor.tensor_type)):
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                state[f"{prefix}.{names[part]}.weight"] = torch.from_numpy(values)
    config = AutoConfig.from_pretrained(folder)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded: Any = family.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, attn_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not loaded[1]["missing_keys"]
    _check_logits(_logits(folder), loaded[0])


def test_a_split_file_is_the_same_model(tmp_path: Path) -> None:
    """Only its first part says what the model is, and how rows are paired."""
    whole, first = (
        write_model(tmp_path / name / "a.gguf", ALL_TYPES, tensors_per_file=count)
        for name, count in (("whole", 0), ("split", 7))
    )
    assert len(list(first.parent.iterdir())) > 2
    np.testing.assert_array_equal(_logits(model_folder(first)), _logits(model_folder(whole)))


def test_pairs_of_rows_are_told_of_the_llama_family_alone(tmp_path: Path) -> None:
    """And of those that llama.cpp converts as it."""
    paired = {"llama": 4, "granite": 4, "smollm3": 4, "qwen2": 0, "olmo2": 0}
    for architecture, expected in paired.items():
        path = write_model(tmp_path / f"{architecture}.gguf", ALL_TYPES, architecture=architecture)
        with TensorFiles(model_folder(path)) as files:
            tensor = files.tensors["model.layers.0.self_attn.q_proj.weight"]
        assert tensor.num_paired_heads == expected


def _logits(folder: Path) -> Array:
    return logits_of(load(folder, "float32"), TEXT)


def _check_logits(whole: Array, model: PreTrainedModel) -> None:
    with torch.no_grad():
        exact = model(torch.tensor([TEXT])).logits[0].numpy()
    np.testing.assert_allclose(whole, exact, rtol=0, atol=5e-4 * float(np.abs(exact).max()))
