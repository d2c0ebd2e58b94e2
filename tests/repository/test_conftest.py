"""What tests/conftest.py promises of every run, shown on a folder with its own few tests."""

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
# A test writes its name many times, so that what runs beside it writes in between.
NOTING = f"""
import os, pytest
def note(name):
    with open(os.environ["NOTES"], "a") as notes:
        for _ in range({NUM_LINES}):
            print(name, file=notes, flush=True)
"""
ALONE = "@pytest.mark.alone\ndef test_alone(): note('alone')\n"
BY_TURNS = """
@pytest.mark.parametrize(
    "name", ["short", pytest.param("alone", marks=pytest.mark.alone)] * 20
)
def test_by_turns(name): note(name)
"""
LONG = "@pytest.mark.long\ndef test_long(): note('long')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("conftest.py", "volume.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{MARKERS}")
    return tmp_path


def run(folder: Path, *options: str) -> tuple[str, list[str]]:
    """What pytest says, and what the tests wrote."""
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


def test_nothing_runs_beside_a_test_that_is_marked_alone(folder: Path) -> None:
    for name in ("first", "second"):
        (folder / f"test_{name}.py").write_text(NOTING + BY_TURNS)
    _, notes = run(folder, "-n", "2", "--dist", "loadfile")
    assert len(notes) == 2 * 40 * NUM_LINES
    runs = [(name, len(list(lines))) for name, lines in itertools.groupby(notes)]
    alone = [length for name, length in runs if name == "alone"]
    assert not any(length % NUM_LINES for length in alone), "something ran in between"


@pytest.mark.parametrize("options", [(), ("-m", "not slow")])
def test_long_tests_run_where_they_are_asked_for(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "test_both.py").write_text(NOTING + LONG + ALONE)
    said, notes = run(folder, *options)
    assert "1 passed, 1 deselected" in said
    assert set(notes) == {"alone"}
    said, notes = run(folder, "--long", *options)
    assert "2 passed" in said
    assert set(notes) == {"alone", "long"}


@pytest.mark.parametrize(
    ("options", "number"),
    [((), 50), (("--long",), 200), (("--hypothesis-profile", "fast"), 10)],
)
def test_hypothesis_makes_a_share_of_the_cases(
    folder: Path, options: tuple[str, ...], number: int
) -> None:
    (folder / "test_cases.py").write_text(
        NOTING
        + "from hypothesis import given, settings, strategies as st\n"
        + "from volume import examples\n"
        + "@settings(max_examples=examples(200))\n@given(st.integers())\n"
        + "def test_cases(n): note('case')\n"
    )
    _, notes = run(folder, *options)
    assert len(notes) == number * NUM_LINES
