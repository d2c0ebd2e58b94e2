"""Steps that are sampled on the device, in Triton's interpreter and in a process of its own."""

from pathlib import Path

import pytest

from tests.verifier.triton_interpreter import run_checks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sessions_get_the_tokens_of_the_host() -> None:
    run_checks(Path(__file__).with_name("step_checks.py"))
