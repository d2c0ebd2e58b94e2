"""The Makefile's own promises; the commands that it runs have tests of their own."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TARGETS = (
    "demo",
    "test",
    "test-fast",
    "test-long",
    "test-deploy",
    "check",
    "fix",
    "protos",
    "clean",
    "help",
)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        # Independent of a `make test` that may run this test.
        env={name: value for name, value in os.environ.items() if "MAKE" not in name},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("help",)])
def test_help_names_every_target(arguments: tuple[str, ...]) -> None:
    shown = make(*arguments)
    assert shown.returncode == 0, shown.stderr
    for target in TARGETS:
        [line] = [line for line in shown.stdout.splitlines() if line.split()[:1] == [target]]
        assert len(line.split()) > 2, "a target without an explanation"


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_a_python_that_is_too_old_is_refused_by_version_and_makes_nothing(
    tmp_path: Path, target: str
) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.18" && exit 0\nexit 1\n')
    old.chmod(0o755)
    made = make(target, f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert made.returncode != 0
    assert "Tandem needs Python 3.11 or newer" in made.stderr
    assert "Python 3.9.18" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_continuous_integration_runs_make_test() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    assert script.read_text().splitlines()[-1] == "exec make test"


def test_make_test_includes_every_check() -> None:
    planned = make("--dry-run", "--always-make", "test", "VENV=/nonexistent/venv").stdout
    for command in (
        "ruff check",
        "ruff format --check",
        "mypy .",
        "lint-imports",
        "buf lint",
        "buf format --diff --exit-code",
        "generate.py --check",
        "-m pytest --numprocesses",
    ):
        assert command in planned


def test_make_test_deselects_only_long_tests_and_make_test_long_none() -> None:
    for target in ("test", "test-long"):
        planned = make("--dry-run", target, "VENV=/nonexistent/venv").stdout
        [command] = [line for line in planned.splitlines() if "--numprocesses" in line]
        options = command[command.index("--numprocesses") :].split()
        in_two_processes = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        assert options == in_two_processes + ["--long"] * (target == "test-long")
