"""How much memory loading a checkpoint takes, measured in a process that does nothing else.

The checkpoint has several files. Memory counts as Linux does for the process: what it wrote, and
the pages of mapped files that it has touched.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
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

# `loaded` is kept, `peak` is what the process has taken at most since `before`.
MEASURE = """
import sys
from pathlib import Path

import torch
{imports}

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
{load}
print("peak", status("VmHWM") - before)
"""

OWN_DECODER = MEASURE.format(
    imports="from verifier.cpu.loading.loader import describe_decoder, load_weights",
    load='loaded = load_weights(describe_decoder(folder), dtype="auto", quantization="none")',
)

GPU_DECODER = MEASURE.format(
    imports="""
from verifier.cpu.loading.loader import describe_decoder
from verifier.gpu.loading import load_weights

# What torch imports at its first computation with "meta" takes more than the loading.
torch.empty(2, device="meta").copy_(torch.zeros(2)).float().add(1.0)
""",
    load="""
elsewhere = torch.device("meta")
loaded = load_weights(describe_decoder(folder), dtype="float32", device=elsewhere)
""",
)


def transformers_loads(device: str, **options: str) -> str:
    return MEASURE.format(
        imports="from verifier.model.checkpoint import load_checkpoint",
        load=f"loaded = load_checkpoint(folder, device=torch.device({device!r}), **{options!r})",
    )


A_RANK_LOADS = MEASURE.format(
    imports="""
from tests.verifier.test_loading_memory import SecondOfTwo
from verifier.config import VerifierConfig
from verifier.model.model_part import load_part
""",
    load="""
config = VerifierConfig(
    model=folder, device="cpu", dtype="bfloat16", threads=1, tensor_parallel_size=2
)
loaded = load_part(config, device=torch.device("DEVICE"), collectives=SecondOfTwo())
""",
)


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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(DENSE, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(EXPERTS, tmp_path_factory.mktemp("experts"))


def weights_bytes(folder: Path) -> int:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) >= 4
    return sum(sizes)


def peak_bytes(script: str, folder: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return int(found[1])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(OWN_DECODER, id="own decoder"),
        pytest.param(transformers_loads("cpu", dtype="bfloat16"), id="transformers"),
    ],
)
def test_on_a_cpu_the_weights_and_a_file_are_the_most(script: str, dense: Path) -> None:
    allowed_bytes = weights_bytes(dense) + SHARD_BYTES + BASE_BYTES
    assert peak_bytes(script, dense) <= allowed_bytes


# The device "meta" takes no memory here, as another device's.


def test_the_decoder_for_gpus_never_has_a_file_in_memory(dense: Path, experts: Path) -> None:
    assert weights_bytes(dense) > SHARD_BYTES + BASE_BYTES
    for folder in (dense, experts):
        assert peak_bytes(GPU_DECODER, folder) <= BASE_BYTES


def test_converted_and_merged_weights_go_straight_to_another_device(experts: Path) -> None:
    # transformers merges the experts' weights.
    script = transformers_loads("meta", dtype="float32")
    assert peak_bytes(script, experts) <= SHARD_BYTES + BASE_BYTES


def test_fp8_weights_go_to_another_device_layer_by_layer(dense: Path) -> None:
    script = transformers_loads("meta", dtype="bfloat16", quantization="fp8")
    # What is read to be quantised stays mapped. The layers in FP8 would be two fifths more, each
    # time; transformers' loading threads sometimes have more of the files mapped at once.
    allowed_bytes = weights_bytes(dense) + SHARD_BYTES
    assert any(peak_bytes(script, dense) <= allowed_bytes for _ in range(6))


@pytest.mark.parametrize(
    ("device", "allowed_weights"),
    [
        # It has read three quarters of the files, of some only its rows, and copied its half.
        ("cpu", 1.5),
        ("meta", 1),
    ],
)
def test_a_rank_takes_its_own_part_beside_the_mapped_files(
    device: str, allowed_weights: float, dense: Path
) -> None:
    script = A_RANK_LOADS.replace("DEVICE", device)
    # Threads have now one more file mapped, now one less.
    allowed_bytes = allowed_weights * weights_bytes(dense) + SHARD_BYTES
    assert peak_bytes(script, dense) <= allowed_bytes
