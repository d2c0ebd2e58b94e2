"""The kernels of experts and FP8, compiled, against plain torch on a GPU, and what waits for it."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, and torch sees none here", allow_module_level=True)

from tests.verifier.cpu.test_loader import save
from tests.verifier.gpu.expert_kernel_checks import *  # noqa: F403
from tests.verifier.gpu.expert_kernel_checks import problem
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.paged_model import make_small_model, some_tokens
from verifier.checkpoint.weight_types import Activation
from verifier.gpu import fp8
from verifier.gpu.kernels.mixture import mix
from verifier.transformers_model.checkpoint import reference_logits
from verifier.transformers_model.fp8_weights import quantise_linear_layers

GPU = torch.device("cuda")
HAS_FP8 = torch.cuda.get_device_capability() >= (8, 9)
TEXT = some_tokens(90, 97)


def test_a_mixture_never_waits_for_the_gpu_and_is_captured() -> None:
    given = problem("random", 40, dtype=torch.bfloat16)
    expected = mix(*given, Activation.SILU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mix(*given, Activation.SILU)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = mix(*given, Activation.SILU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(got, expected)
    # Other experts, at the same addresses.
    given[1].copy_((given[1] + 1) % 6)
    graph.replay()
    assert torch.equal(got, mix(*given, Activation.SILU))


@pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (4096, 1024), (40, 24)])
def test_products_in_fp8_are_those_of_plain_torch(num_rows: int, inputs: int, outputs: int) -> None:
    """Some dimensions are no multiples of 16. What is summed is the same; the order is not."""
    # Drawn by the CPU: after a failed capture, torch's generator on the GPU draws no more.
    values, row_scale = fp8.quantised(torch.randn(num_rows, inputs).to(GPU))
    weight, scale = fp8.quantised(torch.randn(outputs, inputs).to(GPU) / inputs**0.5)
    layer = fp8.ScaledLinear(weight=weight, scale=scale)
    rows = (values.float() * row_scale).bfloat16()
    product = fp8.plain_product(values, weight)
    expected = fp8.rescaled(product, row_scale, scale, None, torch.bfloat16)
    torch.testing.assert_close(layer(rows), expected, rtol=1.6e-2, atol=1e-2)


@pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")
@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_a_decoder_in_fp8_is_near_the_one_in_plain_torch(name: str, tmp_path: Path) -> None:
    save(tmp_path, name, torch.bfloat16)
    on_cpu, on_gpu = (
        RunningGpuDecoder(load(tmp_path, device=device, quantization="fp8")).run_in_chunks(
            TEXT, [33, 1, 17], list(range(64))
        )
        for device in (torch.device("cpu"), GPU)
    )
    assert (on_gpu - on_cpu).abs().mean() <= 0.05 * on_cpu.abs().max()


@pytest.mark.skipif(not HAS_FP8, reason="needs compute capability 8.9")
def test_transformers_modules_in_fp8_are_near_those_in_plain_torch() -> None:
    """Their rows are quantised by the kernel, as those of each rank of several."""
    logits = []
    for device in (torch.device("cpu"), GPU):
        model = make_small_model("llama", torch.bfloat16).model
        model.to(device)  # type: ignore[arg-type]
        quantise_linear_layers(model, device, rounds_rows=True)
        logits.append(reference_logits(model, TEXT).float().cpu())
    # Widened weights, whose rows are not rounded, are at 0.05.
    assert (logits[1] - logits[0]).abs().mean() <= 0.03 * logits[0].abs().max()
