"""The forward pass, every attention backend and the sampler on a GPU, against transformers and the
CPU.
"""

import pytest
import torch
from transformers import PreTrainedModel

from servicekit.config import ConfigError
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import PagedModel, make_small_model, some_tokens
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import (
    GPU_BACKENDS,
    AttentionChoice,
    choose_attention,
    make_backend,
)
from verifier.gpu.fp8 import FP8, widened
from verifier.transformers_model.checkpoint import reference_logits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here"
)
GPU = torch.device("cuda")


def lack_of(backend_name: str) -> str | None:
    """What this installation lacks for a backend; None: nothing."""
    try:
        choose_attention(backend_name, device=GPU, dtype=torch.bfloat16, head_dim=32)
    except ConfigError as error:
        return str(error)
    return None


BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(lack is not None, reason=str(lack)))
    for name in ("sdpa", *GPU_BACKENDS)
    for lack in [lack_of(name)]
]


def small_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = make_small_model(name, dtype).model
    model.to(GPU)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_float32_logits_are_transformers_own(name: str) -> None:
    """Chunks, single tokens and drafts; scattered blocks, windows and experts included."""
    paged = PagedModel(small_model(name, torch.float32))
    token_ids = some_tokens(300, paged.vocab_size)
    rows = paged.run_in_chunks(token_ids, [120, 1, 130, 8, 3], list(range(256))[::-1])
    expected = reference_logits(paged.model, token_ids)
    largest = expected.abs().max().item()
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_bfloat16_logits_are_near_the_float32_models(name: str, backend_name: str) -> None:
    """The error is at most twice that of transformers' own bfloat16 attention."""
    model = small_model(name, torch.bfloat16)
    block_size = 16 if backend_name in ("sdpa", "triton") else 256
    choice = AttentionChoice(name=backend_name, block_size=block_size)
    backend = make_backend(choice, device=GPU)
    paged = PagedModel(model, backend=backend, block_size=block_size, num_blocks=64)
    token_ids = some_tokens(600, paged.vocab_size)
    rows = paged.run_in_chunks(token_ids, [250, 1, 130, 8, 3], list(range(64))[::-1]).float()
    theirs = reference_logits(model, token_ids).float()
    exact = reference_logits(model.float(), token_ids)
    off = (theirs - exact).abs().mean().item()
    assert (rows - exact).abs().mean().item() <= 2 * off


@pytest.mark.parametrize("backend_name", ["auto", *BACKENDS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_verifier_loads_the_bundled_model(backend_name: str, dtype: str) -> None:
    """Loading includes the parity probe."""
    config = VerifierConfig.model_validate(
        {
            "model": MODEL_FOLDER,
            "device": "cuda",
            "dtype": dtype,
            "attention_backend": backend_name,
            "max_num_seqs": 4,
        }
    )
    served = load_model(config).served
    assert (served.device, served.numerics) == ("cuda", "fast")
    assert backend_name in ("auto", served.attention_backend)


def test_fp8_weights_are_widened_as_on_the_cpu() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).reshape(4, 64)
    scale = torch.tensor([[1.0], [0.25], [2.0**-9], [4.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        there = widened(values.to(GPU), scale.to(GPU), dtype)
        assert torch.equal(there.cpu(), widened(values, scale, dtype))
