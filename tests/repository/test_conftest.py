"""The promises of tests/conftest.py, checked on a folder with a few tests of its own."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MARKERS = "markers =\n    alone:\n    long:\n    slow:\n"

NUM_LINES = 300
# A test writes its name many times, so that a concurrent test would write in between.
RECORDING = f"""
import os, pytest
def record(name):
    with open(os.environ["NOTES"], "a") as notes:
        for _ in range({NUM_LINES}):
            print(name, file=notes, flush=True)
"""
ALONE = "@pytest.mark.alone\ndef test_alone(): record('alone')\n"
BY_TURNS = """
@pytest.mark.parametrize(
    "name", ["short", pytest.param("alone", marks=pytest.mark.alone)] * 20
)
def test_by_turns(name): record(name)
"""
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
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | {"NOTES": str(folder / "notes")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, (folder / "notes").read_text().splitlines()


def test_no_other_test_runs_during_a_test_marked_alone(folder: Path) -> None:
    for name in ("first", "second"):
        (folder / f"test_{name}.py").write_text(RECORDING + BY_TURNS)
    _, notes = run(folder, "-n", "2", "--dist", "loadfile")
    assert len(notes) == 2 * 40 * NUM_LINES
    runs = [(name, len(list(lines))) for name, lines in itertools.groupby(notes)]
    alone = [length for name, length in runs if name == "alone"]
    assert not any(length % NUM_LINES for length in alone), "another test ran meanwhile"


@pytest.mark.parametrize("options", [(), ("-m", "not slow")])
def test_long_tests_run_only_with_the_option(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "test_both.py").write_text(RECORDING + LONG + ALONE)
    output, notes = run(folder, *options)
    assert "1 passed, 1 deselected" in output
    assert set(notes) == {"alone"}
    output, notes = run(folder, "--long", *options)
    assert "2 passed" in output
    assert set(notes) == {"alone", "long"}


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
    assert len(notes) == number * NUM_LINES
