"""What the verifier does on this GPU, from random weights.

    python -m benchmarks.gpu [--rows decode stack] [--json FILE] [--quick]

First runs tests/gpu: a wrong result needs no speed. Then the rows; one that fails says why, and the
others go on. Weights have the shapes of Llama-3-8B (steps, attention) and Qwen3-0.6B (the rest),
and mean nothing. Where acceptance matters, recorded texts are replayed: the model computes all it
must, and then the recorded text's next token is made the likeliest. Rows:

    decode       a step over the time to read weights and K/V once at the speed of a copy
    verify       a step that verifies 8 drafts of each sequence over a plain one
    long         the same at the end of texts of 100,000 tokens together, by two layers
    kernel       bytes of K/V per second of one layer's attention over those of a copy
    speculation  replayed code edits: speculation on over off
    random       replayed text that never repeats: speculation on over off
    stack        services over gRPC over the engine in process

What is compared runs by turns; a figure is the median of the rounds, with its 95 % bootstrap
interval. Goals that are missed are bold. --device cpu runs the same rows with a tiny model: that
the command works, nothing about speed.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.arguments import command_parser, write_figures
from benchmarks.gpu import engines, services, steps
from benchmarks.gpu.bench import Bench, Row, size_for
from benchmarks.machine import processor
from benchmarks.report import Measure, measures_table
from benchmarks.services import REPOSITORY
from benchmarks.turns import say

# Rows of one model together.
ROWS: Mapping[str, Row] = {
    "decode": steps.measure_decode,
    "verify": steps.measure_verify,
    "long": steps.measure_long,
    "kernel": steps.measure_kernel,
    "speculation": engines.measure_speculation,
    "random": engines.measure_random,
    "stack": services.measure,
}


async def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a test or a row failed; a missed goal is no failure."""
    arguments = _parse(argv)
    failed = []
    if not arguments.no_tests and _run_tests() != 0:
        failed.append("tests/gpu")
    device = torch.device(arguments.device)
    machine = _machine(device)
    transformers.logging.set_verbosity_error()
    if device.type == "cpu":
        torch.set_num_threads(1)
    measures: list[Measure] = []
    with _folder(arguments.folder) as folder:
        bench = Bench(device=device, size=size_for(device, quick=arguments.quick), folder=folder)
        for name in arguments.rows:
            try:
                async for measure in ROWS[name](bench):
                    measures.append(measure)
                    print(measures_table([measure]).splitlines()[-1], flush=True)
            except Exception:
                traceback.print_exc()
                failed.append(name)
            if device.type == "cuda":
                # The row `stack` has another process beside this one.
                torch.cuda.empty_cache()
            # A later row may fail: what is measured is kept.
            figures = {"machine": machine, "measures": [asdict(each) for each in measures]}
            write_figures("gpu", arguments, {**figures, "failed": failed})
    print(f"{machine}\n\n{measures_table(measures)}")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints stay, 17 GB; else a temporary folder"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu shows that the command works")
    return arguments


def _run_tests() -> int:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q"]
    return subprocess.run(command, cwd=REPOSITORY).returncode


def _machine(device: torch.device) -> str:
    """The device, and what computes on it."""
    if device.type == "cpu":
        return f"{processor()}, torch {torch.__version__}"
    found = torch.cuda.get_device_properties(device)
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, "
        f"{found.total_memory / 1e9:.0f} GB, torch {torch.__version__}, CUDA {torch.version.cuda}; "
        f"{processor()}"
    )


@contextlib.contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
