"""What the numerics digest covers, and when it is empty."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.gpu.running_decoder import load
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.gpu import kernels
from verifier.gpu.numerics_digest import numerics_digest


def digest_of_loaded(**options: Any) -> str:
    config = VerifierConfig(
        model=MODEL_FOLDER, device="cpu", threads=1, num_kv_blocks=32, **options
    )
    return load_model(config).served.numerics_digest


def test_is_empty_where_output_depends_on_the_batch() -> None:
    assert digest_of_loaded(numerics="fast") == ""


def test_of_the_own_decoder_depends_on_types_alone() -> None:
    first = digest_of_loaded(dtype="bfloat16")
    assert first
    assert digest_of_loaded(dtype="bfloat16", max_num_seqs=3) == first
    others = [digest_of_loaded(dtype="float32"), digest_of_loaded(quantization="fp8")]
    assert len({first, *others}) == 3
    config = VerifierConfig(model=MODEL_FOLDER, device="cpu", threads=2, num_kv_blocks=40)
    assert load_model(config).served.numerics_digest == first


def test_depends_on_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    """They are in a file that the model's digest does not cover."""
    served = []
    for name, end_tokens in (("one", [0]), ("other", [0, 7]), ("same", [7, 0])):
        folder = tmp_path / name
        shutil.copytree(MODEL_FOLDER, folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens}))
        config = VerifierConfig(
            model=folder, model_id="m", device="cpu", threads=1, num_kv_blocks=32
        )
        served.append(load_model(config).served)
    one, other, same = served
    assert len({each.model_digest for each in served}) == 1
    assert one.numerics_digest != other.numerics_digest == same.numerics_digest


def test_of_the_decoder_for_gpus_depends_on_type_blocks_and_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = load(MODEL_FOLDER)
    digest_of = functools.partial(numerics_digest, max_model_len=512)
    first = digest_of(weights, block_size=16)
    assert first == digest_of(load(MODEL_FOLDER), block_size=16)
    digests = {first, digest_of(weights, block_size=32)}
    digests.add(digest_of(load(MODEL_FOLDER, "float16"), block_size=16))
    on_gpu = dataclasses.replace(weights, device=torch.device("cuda", 1))
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", {on_gpu.device: capability}.get)
        digests.add(digest_of(on_gpu, block_size=16))
    monkeypatch.setattr(triton, "__version__", "3.0")
    digests.add(digest_of(weights, block_size=16))
    assert len(digests) == 6
    monkeypatch.undo()
    # Another kernel may have another order of sums.
    source = Path(kernels.__file__).with_name("product.py")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == source))
    assert digest_of(weights, block_size=16) != first
