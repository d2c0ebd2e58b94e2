"""Seconds and memory from a checkpoint folder to a model, beside transformers.

    python -m benchmarks.loading [--model FOLDER]

Without --model: random bfloat16 weights of Qwen3-0.6B's shape, 1.2 GB in a temporary folder. Each
loader runs in a process of its own, by turns, after the files were read once. Memory is the
process's largest resident one, with its libraries; seconds are those of the load alone.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.shapes import QWEN3_0_6B, write_checkpoint
from benchmarks.termination import clear_up_on_sigterm

_OWN = """
from verifier.cpu.loading.loader import describe_decoder, load_weights
started = time.perf_counter()
weights = load_weights(describe_decoder(Path(sys.argv[1])), dtype="auto", quantization="none")
"""
_TRANSFORMERS = """
from transformers import AutoModelForCausalLM
started = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
"""
_FRAME = """
import sys, time
from pathlib import Path
{load}
seconds = time.perf_counter() - started
# Not getrusage: its maximum includes the process that forked this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) / 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    clear_up_on_sigterm()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model
        if folder is None:
            folder = write_checkpoint(
                QWEN3_0_6B, Path(temporary), device=torch.device("cpu"), dtype=torch.bfloat16
            )
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{folder}: {size / 2**20:.0f} MiB")
        _read(folder)
        results: dict[str, list[tuple[float, float]]] = {"own": [], "transformers": []}
        for _ in range(options.rounds):
            for name, load in (("own", _OWN), ("transformers", _TRANSFORMERS)):
                results[name].append(_run(_FRAME.format(load=load), folder))
        for name, runs in results.items():
            seconds, megabytes = (np.median([run[i] for run in runs]) for i in (0, 1))
            print(f"{name:>12}: {seconds:6.2f} s, {megabytes:6.0f} MiB at most")


def _read(folder: Path) -> None:
    """Brings the weights into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _run(code: str, folder: Path) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    # A load that takes long logs its progress.
    *_, figures = done.stdout.splitlines()
    seconds, megabytes = figures.split()
    return float(seconds), float(megabytes)


if __name__ == "__main__":
    main()
