"""Runs `tests/gpu` before anything is measured: a wrong result needs no speed."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.services import REPOSITORY

FOLDER = "tests/gpu"
_BARE = ("-c", os.devnull, "--rootdir", str(REPOSITORY), "--noconftest", "--import-mode=importlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsRun:
    """What came of the tests."""

    # Not a class of tests itself.
    __test__ = False

    passed: int
    skipped: int
    # Name and message of each.
    failed: Sequence[str]

    def __str__(self) -> str:
        lines = [
            f"{FOLDER}: {self.passed} passed, {self.skipped} skipped, {len(self.failed)} failed"
        ]
        return "\n".join([*lines, *(f"- {each}" for each in self.failed)])


def run_tests(limit_s: float, folder: str = FOLDER) -> TestsRun:
    """Runs them all within the time; that there is no report is a failure, too.

    If pytest cannot start with the project's configuration, whose plugins may be missing on a
    machine that only serves, the tests run without it.
    """
    end_s = time.monotonic() + limit_s
    run = _run((), folder, limit_s)
    if run.passed + run.skipped == 0:
        run = _run(_BARE, folder, end_s - time.monotonic())
    return run


def _run(options: Sequence[str], folder: str, limit_s: float) -> TestsRun:
    with tempfile.TemporaryDirectory() as kept:
        file = Path(kept) / "report.xml"
        command = [sys.executable, "-m", "pytest", folder, "-q", f"--junitxml={file}", *options]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=max(0.0, limit_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _none("not done in time")
        if done.returncode > 1 or not file.exists():
            last = (f"{done.stdout}{done.stderr}".strip().splitlines() or ["no message"])[-1]
            return _none(f"pytest ended with status {done.returncode}: {last}")
        return read_report(file)


def read_report(file: Path) -> TestsRun:
    """What pytest wrote as `--junitxml`."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.parse(file).iter("testcase"):
        fault = next((each for each in case if each.tag in ("failure", "error")), None)
        if fault is not None:
            message = " ".join(fault.get("message", "").split())
            failed.append(f"{case.get('name')}: {message[:300]}")
        elif any(each.tag == "skipped" for each in case):
            skipped += 1
        else:
            passed += 1
    return TestsRun(passed=passed, skipped=skipped, failed=failed)


def _none(reason: str) -> TestsRun:
    return TestsRun(passed=0, skipped=0, failed=[reason])
