"""The kernels in Triton's interpreter, in processes of their own: the interpreter is chosen by an
environment variable before Triton is imported, for a whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHECKS = sorted(path.name for path in FOLDER.glob("*_checks.py"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_compute_what_the_host_computes(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # `--noconftest`, since those of the folders above import Triton.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", str(FOLDER / name)]
    ran = subprocess.run(
        command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
