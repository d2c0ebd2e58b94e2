"""Runs `tests/gpu` before anything is measured: a wrong result needs no speed."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.supervisor import end
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


async def run_tests(limit_s: float, folder: str = FOLDER) -> TestsRun:
    """Runs them all within the time; that there is no report is a failure, too.

    If pytest cannot start with the project's configuration, whose plugins may be missing on a
    machine that only serves, the tests run without it.
    """
    end_s = time.monotonic() + limit_s
    run = await _run((), folder, limit_s)
    if run.passed + run.skipped == 0:
        run = await _run(_BARE, folder, end_s - time.monotonic())
    return run


async def _run(options: Sequence[str], folder: str, limit_s: float) -> TestsRun:
    with tempfile.TemporaryDirectory() as kept:
        file = Path(kept) / "report.xml"
        command = [sys.executable, "-m", "pytest", folder, "-q", f"--junitxml={file}", *options]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                printed = b"".join(await process.communicate())
        except TimeoutError:
            return _none("not done in time")
        finally:
            await end(process)
        if process.returncode not in (0, 1) or not file.exists():
            last = (printed.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            return _none(f"pytest ended with status {process.returncode}: {last}")
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
