"""The promises of tests/conftest.py, checked on a folder with a few tests of its own."""

import collections
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MARKERS = "markers =\n    long:\n    slow:\n"

RECORDING = """
import os, pytest
def record(name):
    with open(os.environ["NOTES"], "a") as notes:
        print(name, file=notes)
"""
SHORT = "def test_short(): record('short')\n"
LONG = "@pytest.mark.long\ndef test_long(): record('long')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("conftest.py", "volume.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{MARKERS}")
    return tmp_path


def run(folder: Path, *options: str) -> tuple[str, list[str]]:
    """Returns pytest's output, and the lines that the tests wrote."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={
            name: value
            for name, value in os.environ.items()
            if "PYTEST" not in name and name != "TANDEM_TEST_LONG"
        }
        | {
            "NOTES": str(folder / "notes"),
            # Other plugins cost a second each time.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "_hypothesis_pytestplugin",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, (folder / "notes").read_text().splitlines()


@pytest.mark.parametrize(
    ("options", "is_long", "num_examples"),
    [
        ((), False, 50),
        (("-m", "not slow"), False, 50),
        (("--long",), True, 200),
        (("--long", "-m", "not slow"), True, 200),
        (("--hypothesis-profile", "fast"), False, 10),
    ],
)
def test_long_tests_and_every_case_run_only_with_the_option(
    folder: Path, options: tuple[str, ...], is_long: bool, num_examples: int
) -> None:
    """The cases also in processes that tests start."""
    counted = "from volume import cases; print('of', cases(range(1), range(3)).stop)"
    (folder / "test_all.py").write_text(
        RECORDING
        + LONG
        + SHORT
        + "from hypothesis import given, settings, strategies as st\n"
        + "from volume import cases, examples\n"
        + "@settings(max_examples=examples(200))\n@given(st.integers())\n"
        + "def test_examples(n): record('example')\n"
        + "import subprocess, sys\n"
        + "@pytest.mark.parametrize('case', cases(range(1), range(3)))\n"
        + "def test_case(case): record('case')\n"
        + "def test_process():\n"
        + f"    command = [sys.executable, '-c', {counted!r}]\n"
        + "    record(subprocess.check_output(command, text=True).strip())\n"
    )
    output, notes = run(folder, *options)
    assert ("7 passed in" if is_long else "4 passed, 1 deselected") in output
    num_cases = 3 if is_long else 1
    assert collections.Counter(notes) == {
        "short": 1,
        "example": num_examples,
        "case": num_cases,
        f"of {num_cases}": 1,
        **({"long": 1} if is_long else {}),
    }
