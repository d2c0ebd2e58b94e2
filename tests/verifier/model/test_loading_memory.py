"""How much memory loading a checkpoint takes, measured in a process that does nothing else.

The checkpoint has several files. Memory counts as Linux does for the process: what it wrote, and
the pages of mapped files that it has touched.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.long,
]

SHARD_BYTES = 20_000_000
# Modules that loading imports, caches of allocators.
BASE_BYTES = 80_000_000

DENSE = LlamaConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
EXPERTS = MixtralConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)

# One process measures all loads, one after the other. The allocator gives back what is freed, so
# that no load takes what an earlier one has had. transformers loads by one thread: how many files
# several have mapped at once depends on chance.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "HF_DEACTIVATE_ASYNC_LOAD": "1"}

# `loaded` is kept, the peak is what the process has taken at most since `before`.
MEASURE = """
import ctypes, gc, json, sys
from pathlib import Path

import torch
from tests.verifier.model.test_loading_memory import SecondOfTwo
from verifier.config import VerifierConfig
from verifier.checkpoint.description import describe_decoder
from verifier.cpu.loading.loader import load_weights
from verifier.gpu import loading
from verifier.transformers_model.checkpoint import load_checkpoint
from verifier.model.model_part import load_part

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")

def own_decoder(folder):
    return load_weights(describe_decoder(folder), dtype="auto", quantization="none")

def gpu_decoder(folder):
    described = describe_decoder(folder)
    return loading.load_weights(described, dtype="float32", device=ELSEWHERE)

def by_transformers(folder):
    return load_checkpoint(folder, device=CPU, dtype="bfloat16")

def by_transformers_elsewhere(folder):
    return load_checkpoint(folder, device=ELSEWHERE, dtype="float32")

def fp8_elsewhere(folder):
    return load_checkpoint(folder, device=ELSEWHERE, dtype="bfloat16", quantization="fp8")

def rank(folder, device=CPU):
    config = VerifierConfig(
        model=folder, device="cpu", dtype="bfloat16", threads=1, tensor_parallel_size=2
    )
    return load_part(config, device=device, collectives=SecondOfTwo())

def rank_elsewhere(folder):
    return rank(folder, ELSEWHERE)

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

def peak(load, folder):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    loaded = load(Path(folder))
    return status("VmHWM") - before

# What torch imports at its first computation with "meta" takes more than the loading.
torch.empty(2, device="meta").copy_(torch.zeros(2)).float().add(1.0)
for load, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    print("peak", json.dumps([load, Path(folder).name, peak(globals()[load], folder)]))
"""


class SecondOfTwo:
    """One rank's place; loading calls no other."""

    rank = 1
    size = 2

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        return part


def save(config: PretrainedConfig, folder: Path) -> Path:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Any values will do.
    model.to_empty(device="cpu").save_pretrained(folder, max_shard_size=SHARD_BYTES)
    return folder


@dataclass(frozen=True)
class Measured:
    """The size of two checkpoints' weights, and what loads of them took at most."""

    weights_bytes: dict[str, int]
    peaks: dict[tuple[str, str], int]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("checkpoints")
    folders = {"dense": save(DENSE, folder / "dense"), "experts": save(EXPERTS, folder / "experts")}
    loads = [(load, str(folders[name])) for load, name in LOADS]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *itertools.chain(*loads)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = re.findall(r"^peak (.+)$", done.stdout, re.MULTILINE)
    return Measured(
        weights_bytes={name: weights_bytes(folder) for name, folder in folders.items()},
        peaks={(load, name): peak for load, name, peak in map(json.loads, found)},
    )


def weights_bytes(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) >= 4
    return sum(sizes)


LOADS = [
    ("own_decoder", "dense"),
    ("by_transformers", "dense"),
    ("gpu_decoder", "dense"),
    ("gpu_decoder", "experts"),
    ("by_transformers_elsewhere", "experts"),
    ("fp8_elsewhere", "dense"),
    ("rank", "dense"),
    ("rank_elsewhere", "dense"),
]


@pytest.mark.parametrize("load", ["own_decoder", "by_transformers"])
def test_on_a_cpu_the_weights_and_a_file_are_the_most(load: str, measured: Measured) -> None:
    allowed_bytes = measured.weights_bytes["dense"] + SHARD_BYTES + BASE_BYTES
    assert measured.peaks[load, "dense"] <= allowed_bytes


# The device "meta" takes no memory here, as another device's.


def test_the_decoder_for_gpus_never_has_a_file_in_memory(measured: Measured) -> None:
    assert measured.weights_bytes["dense"] > SHARD_BYTES + BASE_BYTES
    for folder in ("dense", "experts"):
        assert measured.peaks["gpu_decoder", folder] <= BASE_BYTES


def test_converted_and_merged_weights_go_straight_to_another_device(measured: Measured) -> None:
    # transformers merges the experts' weights.
    assert measured.peaks["by_transformers_elsewhere", "experts"] <= SHARD_BYTES + BASE_BYTES


def test_fp8_weights_go_to_another_device_layer_by_layer(measured: Measured) -> None:
    # What is read to be quantised stays mapped: three quarters. The layers in FP8 would be two
    # fifths more.
    assert measured.peaks["fp8_elsewhere", "dense"] <= measured.weights_bytes["dense"]


@pytest.mark.parametrize(
    ("load", "allowed_weights"),
    [
        # It has read three quarters of the files, of some only its rows, and copied its half.
        ("rank", 1.5),
        ("rank_elsewhere", 1),
    ],
)
def test_a_rank_takes_its_own_part_beside_the_mapped_files(
    load: str, allowed_weights: float, measured: Measured
) -> None:
    allowed_bytes = allowed_weights * measured.weights_bytes["dense"] + SHARD_BYTES
    assert measured.peaks[load, "dense"] <= allowed_bytes
