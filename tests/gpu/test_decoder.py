"""The decoder for GPUs on one: with its kernels, near transformers' float32 logits."""

from pathlib import Path

import pytest
import torch

from tests.verifier.cpu.test_loader import CONFIGS, save
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import transformers_logits
from tests.verifier.paged_model import some_tokens

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
)
GPU = torch.device("cuda")
TEXT = some_tokens(90, 97)
SCATTERED = list(range(64))[::-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_logits_of_every_family_are_transformers_ones(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    expected = transformers_logits(tmp_path, TEXT)
    running = RunningGpuDecoder(load(tmp_path, device=GPU))
    rows = running.run_in_chunks(TEXT, [33, 1, 1, 17, 8, 2], SCATTERED)
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["llama_biases", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo3"]
)
def test_sixteen_bit_logits_are_as_near_the_float32_ones_as_transformers(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """The error is at most twice that of transformers' own modules in that type, on a CPU."""
    save(tmp_path, name, getattr(torch, dtype))
    exact = transformers_logits(tmp_path, TEXT, torch.float32)
    off = (transformers_logits(tmp_path, TEXT) - exact).abs().mean().item()
    running = RunningGpuDecoder(load(tmp_path, device=GPU))
    rows = running.run_in_chunks(TEXT, [33, 1, 1, 17, 8, 2], SCATTERED)
    assert (rows - exact).abs().mean().item() <= 2 * off
