"""What is offered on CPUs and GPUs has one source, which agrees with flags, refusals and the page.

No test here runs on a GPU: `torch.cuda`'s answers are a stand-in's.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from servicekit.config import ConfigError
from tests.verifier.conftest import MODEL_FOLDER
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import choose_attention
from verifier.model import support
from verifier.model.describe import describe
from verifier.model.support import (
    ATTENTION,
    FEATURES,
    Feature,
    driver_version,
    gpus,
    on_cpu,
)

REPOSITORY = Path(__file__).parents[3]
HOPPER, TURING = (9, 0), (7, 5)


def test_the_page_has_the_table() -> None:
    """After a change: put what `support.table()` returns into the page."""
    assert f"\n{support.table()}\n" in (REPOSITORY / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize("field", ["numerics", "dtype", "quantization", ATTENTION])
def test_every_value_of_the_flags_is_there_once(field: str) -> None:
    values = get_args(VerifierConfig.model_fields[field].annotation)
    listed = [feature.value for feature in FEATURES if feature.field == field]
    assert sorted(listed) == sorted(set(values) - {"auto"})


def config_with(feature: Feature, device: str) -> VerifierConfig:
    options: Any = {feature.field: feature.value, "model": MODEL_FOLDER, "device": device}
    return VerifierConfig(**options)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.value)
def test_a_cpu_offers_what_is_said(feature: Feature) -> None:
    """As the code that serves decides."""
    if feature.field != ATTENTION:
        assert feature.cpu.is_offered
        return
    try:
        choose_attention(
            feature.value,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            head_dim=128,
        )
    except ConfigError:
        assert not feature.cpu.is_offered
    else:
        assert feature.cpu.is_offered


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.value)
def test_what_only_the_own_decoder_has_is_refused_on_a_gpu(feature: Feature) -> None:
    from verifier.model.own_model import find_own

    if feature.gpu.is_offered:
        assert find_own(config_with(feature, "cuda")) is None
        assert (feature.refusal(TURING) or "").startswith("needs compute capability 8.")
    else:
        with pytest.raises(ConfigError):
            find_own(config_with(feature, "cuda"))
        assert feature.refusal(HOPPER) == feature.gpu.note


@pytest.mark.stand_in
def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "device_count": lambda: 2,
        "get_device_capability": lambda index: (HOPPER, TURING)[index],
        "get_device_name": lambda index: f"GPU {index}",
        "mem_get_info": lambda index: (5 + index, 10),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr("verifier.model.describe.has_gpu_driver", lambda: True)
    described = describe(MODEL_FOLDER)
    assert described["gpus"] == list(gpus())
    new, old = described["gpus"]
    assert (new["name"], new["compute_capability"], new["can_run"]) == ("GPU 0", "9.0", True)
    assert (old["free_bytes"], old["total_bytes"], old["can_run"]) == (6, 10, False)
    assert all(each["refusal"] for each in old["support"])
    assert described["gpu_software"].keys() == {"driver", "CUDA of torch", "triton", "flash-attn"}


def test_a_processor_that_the_own_decoder_refuses_lacks_what_only_that_has() -> None:
    refusals = {each["value"]: each["refusal"] for each in on_cpu("no AVX2")}
    assert refusals["strict"] == "no AVX2"
    assert refusals["fast"] is refusals["fp8"] is refusals["sdpa"] is None
    assert {each["value"]: each["refusal"] for each in on_cpu()}["strict"] is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\nGCC 12.3",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release", "580.65"),
        ("something else", None),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str | None, tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(text)
    assert driver_version(file) == version
