"""The promises of tests/conftest.py, checked on a folder with a few tests of its own."""

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


@pytest.mark.parametrize("options", [(), ("-m", "not slow")])
def test_long_tests_run_only_with_the_option(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "test_both.py").write_text(RECORDING + LONG + SHORT)
    output, notes = run(folder, *options)
    assert "1 passed, 1 deselected" in output
    assert set(notes) == {"short"}
    output, notes = run(folder, "--long", *options)
    assert "2 passed" in output
    assert set(notes) == {"short", "long"}


@pytest.mark.parametrize(
    ("options", "number"),
    [((), 50), (("--long",), 200), (("--hypothesis-profile", "fast"), 10)],
)
def test_hypothesis_runs_a_share_of_the_cases(
    folder: Path, options: tuple[str, ...], number: int
) -> None:
    (folder / "test_cases.py").write_text(
        RECORDING
        + "from hypothesis import given, settings, strategies as st\n"
        + "from volume import examples\n"
        + "@settings(max_examples=examples(200))\n@given(st.integers())\n"
        + "def test_cases(n): record('case')\n"
    )
    _, notes = run(folder, *options)
    assert len(notes) == number


@pytest.mark.parametrize(("options", "number"), [((), 1), (("--long",), 3)])
def test_a_choice_of_cases_runs_also_in_processes_that_tests_start(
    folder: Path, options: tuple[str, ...], number: int
) -> None:
    counted = "from volume import cases; print(cases(range(1), range(3)).stop)"
    (folder / "test_cases.py").write_text(
        RECORDING
        + "import subprocess, sys\n"
        + "from volume import cases\n"
        + "@pytest.mark.parametrize('case', cases(range(1), range(3)))\n"
        + "def test_case(case): record('case')\n"
        + "def test_process():\n"
        + f"    command = [sys.executable, '-c', {counted!r}]\n"
        + "    record(subprocess.check_output(command, text=True).strip())\n"
    )
    _, notes = run(folder, *options)
    assert notes == ["case"] * number + [str(number)]
