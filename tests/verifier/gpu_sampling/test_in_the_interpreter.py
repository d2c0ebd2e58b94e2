"""The sampler's kernels in Triton's interpreter, in a process of its own."""

from pathlib import Path

import pytest

from tests.verifier.triton_interpreter import run_checks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compute_what_the_host_computes() -> None:
    run_checks(*sorted(Path(__file__).parent.glob("*_checks.py")))
