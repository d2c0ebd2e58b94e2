"""`--numerics strict` on a GPU: the same bits in every batch, and by a captured graph."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, and torch sees none here", allow_module_level=True)

from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.gpu.product_checks import *  # noqa: F403
from tests.verifier.gpu.product_checks import DTYPES, STRICT, numbers
from tests.verifier.gpu.strict_checks import *  # noqa: F403
from tests.verifier.quantized_files import write_quantized
from verifier.build import LoadedModel, load_model
from verifier.checkpoint.weight_types import Activation
from verifier.config import VerifierConfig
from verifier.gpu.kernels.operations import TritonOperations
from verifier.gpu.kernels.product import ROOMY_SHARED_MEMORY
from verifier.gpu.operations import Operations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 48])
def test_a_captured_layer_is_the_eager_one(num_rows: int, dtype: torch.dtype) -> None:
    """Norm and products of a graph, replayed for other rows, against launches of their own."""
    rows = numbers(num_rows, 256, seed=1, dtype=torch.float32)
    norm = numbers(256, seed=2, dtype=torch.float32)
    weights = [numbers(*shape, seed=3, dtype=dtype) / 16 for shape in ((704, 256), (256, 352))]

    def layer() -> torch.Tensor:
        normed = STRICT.add_norm(rows, None, None, norm, eps=1e-6, dtype=dtype)
        gated = STRICT.gate(STRICT.linear(normed, weights[0]), Activation.SILU)
        return STRICT.linear(gated, weights[1])

    layer()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in (4, 5):
        rows.copy_(numbers(num_rows, 256, seed=seed, dtype=torch.float32))
        graph.replay()
        assert torch.equal(captured, layer())


def loaded(dtype: str, numerics: str, **options: object) -> LoadedModel:
    config = {"model": MODEL_FOLDER, "device": "cuda", "dtype": dtype, "numerics": numerics}
    return load_model(VerifierConfig.model_validate({**config, "max_num_seqs": 4, **options}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_verifier_loads_the_bundled_model(dtype: str) -> None:
    """Loading includes the comparison of bits over chunks."""
    served = loaded(dtype, "strict").served
    assert (served.device, served.numerics, served.attention_backend) == (
        "cuda",
        "strict",
        "triton",
    )
    assert served.numerics_digest
    assert loaded(dtype, "strict", max_num_seqs=9).served.numerics_digest == served.numerics_digest
    assert not loaded(dtype, "fast").served.numerics_digest


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("method", ["awq", "gptq_int8", "fp8_blocks", "fp8_channel"])
def test_a_verifier_loads_weights_in_groups(method: str, model_type: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, method, model_type=model_type)
    for numerics in ("strict", "fast"):
        served = loaded("bfloat16", numerics, model=tmp_path).served
        assert (served.numerics, served.dtype[-8:]) == (numerics, " weights")


@pytest.mark.parametrize("num_rows", [1, 16, 48])
def test_that_kernels_overlap_changes_no_bit(num_rows: int) -> None:
    """Of a graph of layers whose kernels take a microsecond or many times as long, by turns."""
    hidden, size, dtype = 1024, 14336, torch.bfloat16
    shapes = [(2 * size, hidden), (hidden, size)] * 4
    weights = [numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    norm = numbers(hidden, seed=8, dtype=torch.float32)
    rows = numbers(num_rows, hidden, seed=9, dtype=torch.float32)

    def layers(operations: Operations) -> torch.Tensor:
        residual, update = rows.clone(), None
        for gate_up, down in zip(weights[::2], weights[1::2], strict=True):
            normed = operations.add_norm(residual, update, None, norm, eps=1e-6, dtype=dtype)
            gated = operations.gate(operations.linear(normed, gate_up), Activation.SILU)
            update = operations.linear(gated, down)
        return operations.add_norm(residual, update, None, norm, eps=1e-6, dtype=dtype)

    apart = TritonOperations(is_strict=True, shared_memory=ROOMY_SHARED_MEMORY)
    layers(STRICT)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(STRICT)
    for seed in range(10, 30):
        rows.copy_(numbers(num_rows, hidden, seed=seed, dtype=torch.float32))
        expected = layers(apart)
        assert expected.isfinite().all()
        assert len(expected.unique()) > hidden // 8
        graph.replay()
        assert torch.equal(captured, expected)
        assert torch.equal(layers(STRICT), expected)
