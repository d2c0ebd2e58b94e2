"""Triton's kernels in Triton's interpreter: all checks in one process, which imports much."""

from pathlib import Path

import pytest

from tests.verifier.triton.triton_interpreter import run_checks


@pytest.mark.timeout(900)
def test_kernels_compute_what_they_shall() -> None:
    files = Path(__file__).parents[1].rglob("*_checks.py")
    run_checks(*sorted(file for file in files if not file.name.startswith("test_")))


def test_a_check_that_fails_there_fails_here(tmp_path: Path) -> None:
    file = tmp_path / "failing_checks.py"
    file.write_text("def test_it():\n    assert 1 + 1 == 3\n")
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        run_checks(file)
