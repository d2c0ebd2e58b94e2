"""Linear layers that multiply in FP8: against the dequantised product, in whole decoders, and at
the check of a loaded model. On a CPU; tests/gpu/ has the GPU's matrix units.
"""

from pathlib import Path

import pytest
import structlog
import torch

from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.running_decoder import CPU, RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import SCATTERED, TEXT, folder_of, transformers_logits
from tests.verifier.gpu.test_gpu_model import config_for
from verifier.attention.sdpa import SdpaBackend
from verifier.checkpoint.refusals import CheckpointError
from verifier.gpu import fp8
from verifier.gpu.fp8 import (
    FP8,
    TORCH_ROW_OPERATIONS,
    ScaledLinear,
    plain_product,
    quantised,
    scaled_linear,
)
from verifier.gpu.weights import DenseLinear, GpuWeights, Mlp
from verifier.model.gpu_model import find_on_gpu, load_on_gpu
from verifier.parity.comparison import paged_logits
from verifier.parity.gpu_check import check_decoder
from verifier.parity.reference import fp8_reference
from verifier.transformers_model.fp8_weights import Fp8Linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 3, 48), (0, 48)])
def test_a_product_is_that_of_the_quantised_values(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """In float64, then rounded to bfloat16."""
    rows = (torch.randn(shape) * 3).to(dtype)
    weight, scale = quantised(torch.randn(32, 48))
    bias = torch.randn(32).to(dtype)
    values, row_scale = quantised(rows.reshape(-1, 48))
    exact = (values.double() * row_scale) @ (weight.double() * scale).t()
    expected = (exact.view(*shape[:-1], 32) + bias.double()).float()
    got = scaled_linear(rows, weight, scale, bias, TORCH_ROW_OPERATIONS)
    assert (got.dtype, got.shape) == (dtype, (*shape[:-1], 32))
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-1)
    if len(exact):
        assert not torch.equal(got.float(), (rows.float() @ (weight.float() * scale).t()))


def test_a_loaded_layer_has_the_values_of_transformers_own_fp8_layers() -> None:
    """Of modules in one matrix, each as it is by itself; head, embeddings and norms are kept."""
    weights, plain = load(MODEL_FOLDER, quantization="fp8"), load(MODEL_FOLDER)
    layer, ordinary = weights.layers[1], plain.layers[1]
    assert isinstance(layer.mlp, Mlp)
    assert isinstance(ordinary.mlp, Mlp)
    pairs = [
        (layer.qkv, ordinary.qkv),
        (layer.output, ordinary.output),
        (layer.mlp.gate_up, ordinary.mlp.gate_up),
        (layer.mlp.down, ordinary.mlp.down),
    ]
    for scaled, dense in pairs:
        assert isinstance(scaled, ScaledLinear)
        assert isinstance(dense, DenseLinear)
        outputs, inputs = dense.weight.shape
        module = torch.nn.Linear(inputs, outputs, bias=False)
        module.weight.data = dense.weight
        expected = Fp8Linear(module)
        assert scaled.weight.dtype is FP8
        assert torch.equal(scaled.weight.float(), expected.weight.float())
        assert torch.equal(scaled.scale, expected.scale)
    assert torch.equal(weights.head, plain.head)
    assert torch.equal(weights.embeddings, plain.embeddings)


def check(weights: GpuWeights, folder: Path) -> None:
    exact, rounding, fp8_distance = fp8_reference(folder, dtype=weights.dtype)
    check_decoder(
        weights,
        SdpaBackend(device=CPU),
        block_size=16,
        exact=exact.numpy(),
        rounding=rounding,
        fp8_distance=fp8_distance,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["llama_biases", "qwen3", "gemma3", "gemma4", "phi3", "mistral", "olmo3", "qwen3_5"]
)
def test_a_decoder_passes_the_check(name: str, dtype: str, tmp_path: Path) -> None:
    save(tmp_path, name, getattr(torch, dtype))
    check(load(tmp_path, quantization="fp8"), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_decoder_is_near_the_model_without_quantization(dtype: str) -> None:
    exact = transformers_logits(MODEL_FOLDER, TEXT, torch.float32)
    running = RunningGpuDecoder(load(MODEL_FOLDER, dtype, quantization="fp8"))
    rows = running.run_in_chunks(TEXT, [33, 1, 17, 8], SCATTERED)
    assert 0 < (rows - exact).abs().mean() < 0.1 * exact.std()


def test_a_gpu_whose_products_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a factor of two."""
    weights = load(MODEL_FOLDER, quantization="fp8")
    check(weights, MODEL_FOLDER)

    def doubled(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * plain_product(values, weight)

    monkeypatch.setattr(fp8, "plain_product", doubled)
    with pytest.raises(CheckpointError, match="away from those in float32"):
        check(weights, MODEL_FOLDER)


def test_a_model_is_loaded_with_fp8_and_says_so() -> None:
    config = config_for(device="cpu", quantization="fp8")
    described = find_on_gpu(config, GPU)
    assert described is not None
    ready = load_on_gpu(config, described, CPU)
    assert ready.dtype == "bfloat16, fp8 weights and activations"
    rows = torch.from_numpy(paged_logits(ready.model, list(range(30)), [11], block_size=16))
    assert rows.isfinite().all()


def test_mixtures_of_experts_in_fp8_are_not_the_decoders() -> None:
    with structlog.testing.capture_logs() as logs:
        assert find_on_gpu(config_for(folder_of("mixtral"), quantization="fp8"), GPU) is None
    assert logs[0]["reason"] == "--quantization fp8 of a mixture of experts"
