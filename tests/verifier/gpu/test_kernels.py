"""The Triton kernels in Triton's interpreter, in a process of its own: the interpreter is chosen by
an environment variable before Triton is imported, for a whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = (
    "kernel_checks.py",
    "expert_kernel_checks.py",
    *(pytest.param(f"{name}_checks.py", marks=pytest.mark.slow) for name in ("product", "strict")),
)
ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_compute_what_they_shall(checks: str) -> None:
    file = Path(__file__).with_name(checks)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # `--noconftest`, since those of the folders above import half of the project.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--noconftest", str(file)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


@pytest.mark.parametrize("kernels", ["compile_kernels", "compile_expert_kernels"])
def test_kernels_compile_for_every_generation_of_gpus_that_is_served(
    kernels: str, tmp_path: Path
) -> None:
    """By Triton's own assembler, which needs no GPU."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"tests.verifier.gpu.{kernels}"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert len(ran.stdout.splitlines()) == 9
