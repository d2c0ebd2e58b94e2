"""What the numerics digest covers, and when it is empty."""

from typing import Any

import numba
import pytest
import torch
import transformers

from tests.verifier.conftest import MODEL_FOLDER
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.model import numerics_digest as module
from verifier.model.cpu_kernels import cpu_lines
from verifier.model.numerics_digest import numerics_digest

LOGITS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
OF_ONE: dict[str, Any] = {
    "dtype": torch.float32,
    "quantization": "none",
    "numerics": "strict",
    "attention_backend": "sdpa",
    "tensor_parallel_size": 1,
    "probe_logits": LOGITS,
}


def digest_of_loaded(**options: Any) -> str:
    config = VerifierConfig(
        model=MODEL_FOLDER, device="cpu", threads=1, num_kv_blocks=32, **options
    )
    return load_model(config).served.numerics_digest


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"numerics": "other"},
        {"attention_backend": "other"},
        {"tensor_parallel_size": 2},
        {"probe_logits": torch.nextafter(LOGITS, torch.tensor(9.0))},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_differs_with_any_setting_and_any_bit_of_the_probe(changed: dict[str, Any]) -> None:
    assert numerics_digest(**OF_ONE) == numerics_digest(**OF_ONE)
    assert numerics_digest(**OF_ONE) != numerics_digest(**(OF_ONE | changed))


@pytest.mark.parametrize("library", [torch, transformers, numba], ids=lambda each: each.__name__)
def test_differs_with_a_librarys_version(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    before = numerics_digest(**OF_ONE)
    monkeypatch.setattr(library, "__version__", "0.0.1")
    assert numerics_digest(**OF_ONE) != before


@pytest.mark.parametrize("line", ["flags", "Features", "model name"])
def test_differs_with_the_processor(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    digests = set()
    for value in ("fma avx2", "fma avx2 amx_tile"):
        monkeypatch.setattr(module, "cpu_lines", lambda value=value: {line: value})
        digests.add(numerics_digest(**OF_ONE))
    assert len(digests) == 2


def test_reads_the_first_processor(tmp_path: Any) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A: b\nflags\t\t: x y\n\nflags\t: z\n")
    assert cpu_lines(path) == {"processor": "0", "model name": "A: b", "flags": "x y"}
    assert cpu_lines(tmp_path / "none") == {}


@pytest.mark.parametrize("options", [{"numerics": "fast"}, {"acceptance_rule": "ratio"}])
def test_is_empty_where_output_depends_on_the_batch_or_the_drafts(options: dict[str, Any]) -> None:
    assert digest_of_loaded(**options) == ""


def test_of_the_own_decoder_depends_on_types_alone() -> None:
    first = digest_of_loaded(dtype="bfloat16")
    assert first
    assert digest_of_loaded(dtype="bfloat16", max_num_seqs=3, block_size=32) == first
    others = [digest_of_loaded(dtype="float32"), digest_of_loaded(quantization="int8")]
    assert len({first, *others}) == 3
    config = VerifierConfig(model=MODEL_FOLDER, device="cpu", threads=2, num_kv_blocks=40)
    assert load_model(config).served.numerics_digest == first
