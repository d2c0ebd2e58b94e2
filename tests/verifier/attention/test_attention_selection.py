"""Which attention backend serves a model, in which blocks, and which choices are refused."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.config import ConfigError
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import CPU
from verifier.build import load_model
from verifier.config import VerifierConfig
from verifier.gpu.attention.selection import AttentionChoice, choose_attention

CUDA = torch.device("cuda")


class Machine:
    """What counts as installed: at first, all that any backend needs."""

    def __init__(self, headers: Path) -> None:
        self.installed = {"triton", "flash_attn", "gcc"}
        self.headers = headers
        (headers / "Python.h").touch()

    def without(self, *names: str) -> None:
        self.installed -= set(names)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    find_spec = importlib.util.find_spec

    def find(name: str) -> Any:
        if name in ("triton", "flash_attn"):
            return object() if name in machine.installed else None
        return find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in machine.installed else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(machine.headers))
    return machine


def choose(
    name: str,
    *,
    device: torch.device = CUDA,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
) -> AttentionChoice:
    return choose_attention(name, device=device, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        ("auto", {"device": CPU}, ("sdpa", 16)),
        ("auto", {}, ("triton", 16)),
        ("auto", {"dtype": torch.float32}, ("triton", 16)),
        ("auto", {"dtype": torch.float64}, ("sdpa", 16)),
        ("auto", {"head_dim": 512}, ("triton", 16)),
        ("auto", {"head_dim": 520}, ("sdpa", 16)),
        ("sdpa", {}, ("sdpa", 16)),
        ("triton", {"head_dim": 80}, ("triton", 16)),
        ("flash_attn", {}, ("flash_attn", 256)),
    ],
)
def test_a_backend_is_chosen_that_can_serve_the_model(
    name: str, options: dict, chosen: tuple[str, int]
) -> None:
    assert choose(name, **options) == AttentionChoice(name=chosen[0], block_size=chosen[1])


def test_auto_takes_the_next_one_that_is_installed(machine: Machine) -> None:
    machine.without("triton")
    assert choose("auto").name == "flash_attn"
    machine.without("flash_attn")
    assert choose("auto").name == "sdpa"
    for name in ("triton", "flash_attn"):
        with pytest.raises(ConfigError, match=rf"--attention-backend: {name}: .* not installed"):
            choose(name)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": CPU}, "--attention-backend: {name}: runs on a GPU only"),
        ({"dtype": torch.float64}, "--attention-backend: {name}: .* --dtype is float64"),
        ({"head_dim": 520}, "--attention-backend: {name}: cannot serve heads of 520"),
        ({"head_dim": 60}, "--attention-backend: {name}: cannot serve heads of 60"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.format(name=name)):
        choose(name, **options)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_the_flag_reaches_the_loading_of_a_model(name: str) -> None:
    config = VerifierConfig.model_validate(
        {"model": MODEL_FOLDER, "device": "cpu", "threads": 1, "attention_backend": name}
    )
    with pytest.raises(ConfigError, match=f"--attention-backend: {name}: runs on a GPU"):
        load_model(config)


def test_triton_needs_what_compiles_its_launchers(machine: Machine) -> None:
    machine.without("gcc")
    assert choose("auto").name == "flash_attn"
    with pytest.raises(ConfigError, match="triton: no C compiler"):
        choose("triton")
    machine.installed.add("clang")
    assert choose("triton").name == "triton"
    (machine.headers / "Python.h").unlink()
    with pytest.raises(ConfigError, match="triton: Python's headers"):
        choose("triton")
