"""The decoder's Triton kernels, compiled in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.verifier.triton_interpreter import ROOT
from tests.volume import cases

TYPES = ["fp32", "fp16", "bf16"]
# Each generation and each type once; Ampere, Ada, Hopper.
SOME = [(80, "fp32"), (89, "fp16"), (90, "bf16")]
ALL = [(capability, element) for capability in (80, 89, 90) for element in TYPES]


def test_kernels_compile_for_every_generation_of_gpus_that_is_served(cache: pytest.Cache) -> None:
    """By Triton's own assembler, which needs no GPU; a later run compiles what changed."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    targets = [f"{capability}:{element}" for capability, element in cases(SOME, ALL)]
    command = [sys.executable, "-m", "tests.verifier.gpu.compile_kernels", *targets]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert len(ran.stdout.splitlines()) == len(targets)
