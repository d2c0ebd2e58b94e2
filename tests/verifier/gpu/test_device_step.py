"""Steps that are sampled on the device, in Triton's interpreter and in a process of its own: the
interpreter is chosen by an environment variable before Triton is imported, for a whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("step_checks.py")
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sessions_get_the_tokens_of_the_host() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # `--noconftest`, since those of the folders above import half of the project.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--noconftest", str(CHECKS)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
