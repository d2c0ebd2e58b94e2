"""torchrun's variables and the flags for devices: accepted and refused values."""

import re
from pathlib import Path

import pytest
import torch

from servicekit.config import ConfigError
from verifier.config import VerifierConfig
from verifier.model.model_part import choose_device
from verifier.tensor_parallel.launch import Launch, loopback_variables, read_launch

TORCHRUN = {
    "RANK": "2",
    "LOCAL_RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_give_rank_and_size() -> None:
    assert read_launch(TORCHRUN, 4) == Launch(rank=2, size=4)


@pytest.mark.parametrize("environ", [{}, TORCHRUN | {"WORLD_SIZE": "1"}])
def test_a_single_process_needs_no_torchrun(environ: dict[str, str]) -> None:
    assert read_launch(environ, 1) is None


@pytest.mark.parametrize(
    ("environ", "size", "message"),
    [
        ({}, 2, "2: start it with `torchrun --nproc-per-node 2 -m verifier ...`"),
        (TORCHRUN, 2, "2: torchrun has started 4 processes; --nproc-per-node must be 2"),
        (TORCHRUN, 1, "1: torchrun has started 4 processes"),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "2"},
            4,
            "4: all processes must run on one machine; 2 of them do here",
        ),
    ],
)
def test_a_wrong_number_of_processes_is_refused(
    environ: dict[str, str], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--tensor-parallel-size: {message}")):
        read_launch(environ, size)


def test_the_ranks_traffic_stays_on_loopback_unless_an_operator_decides() -> None:
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert loopback_variables({}) == both
    other = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": ""}
    with pytest.raises(ConfigError, match=r"NCCL_SOCKET_IFNAME: eth1: .*--allow-plaintext"):
        loopback_variables(other)
    assert loopback_variables(other, allow_plaintext=True) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert loopback_variables(both) == {}


def test_every_rank_gets_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's answers about GPUs are faked."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    two = VerifierConfig(model=Path("model"), device="cuda", tensor_parallel_size=2)
    assert choose_device(two, rank=1) == torch.device("cuda", 1)
    assert chosen == [1]
    four = VerifierConfig(model=Path("model"), device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: 4: there are 2 GPUs"):
        choose_device(four, rank=0)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's answers about a GPU are faked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    config = VerifierConfig(model=Path("model"), device="cuda")
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu, it=capability: it)
        assert choose_device(config, rank=0) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 5))
    with pytest.raises(ConfigError, match=r"GPU 0 has compute capability 7\.5; 8\.0 is needed"):
        choose_device(config, rank=0)


def test_fp8_on_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's answers about a GPU are faked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 6))
    config = VerifierConfig(model=Path("model"), device="cuda", quantization="fp8")
    with pytest.raises(ConfigError, match=r"--quantization: fp8: GPU 0 .* 8\.6; 8\.9 is needed"):
        choose_device(config, rank=0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (8, 9))
    for version in ("2.9.0+cu126", "2.11.1"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(
            ConfigError, match=r"--quantization: fp8: .* 8\.9 torch 2\.12 is needed"
        ):
            choose_device(config, rank=0)
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert choose_device(config, rank=0) == torch.device("cuda", 0)
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    assert choose_device(config, rank=0) == torch.device("cuda", 0)
