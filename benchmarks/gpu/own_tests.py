"""Runs `tests/gpu` before anything is measured: a wrong result needs no speed."""

import asyncio
import collections
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.supervisor import end
from benchmarks.services import REPOSITORY
from servicekit.cores import available_cores

FOLDER = "tests/gpu"
# Most of the time goes to compiling kernels, one after the other.
_MOST_PROCESSES = 16
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
    """Runs them all; those that are not done within the time, or no outcome, are a failure, too.

    Without the project's configuration, whose plugins may be missing on a machine that only serves;
    in several processes where xdist is not.
    """
    processes = []
    if importlib.util.find_spec("xdist"):
        # Slow tests stand side by side: a process that has nothing left takes some over.
        processes = ["-n", str(min(_MOST_PROCESSES, available_cores())), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as kept:
        file = Path(kept) / "outcomes"
        file.touch()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", folder, "-q", *_BARE, *processes),
            *("-p", "benchmarks.gpu.outcomes", "--outcomes", str(file)),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                printed = b"".join(await process.communicate())
        except TimeoutError:
            return _read(file, "not done in time")
        finally:
            await end(process)
        if process.returncode not in (0, 1):
            last = (printed.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            return _read(file, f"pytest ended with status {process.returncode}: {last}")
        return _read(file)


def _read(file: Path, *reasons: str) -> TestsRun:
    """What is in the file, and reasons why there is no more: then, what had begun, too."""
    told = [json.loads(line) for line in file.read_text().splitlines()]
    outcomes = collections.Counter(outcome for outcome, _, _ in told)
    # Tests of several files may have one name.
    begun = collections.Counter(name for outcome, name, _ in told if outcome == "begun")
    begun.subtract(name for outcome, name, _ in told if outcome != "begun")
    if reasons and +begun:
        reasons = (*reasons, f"begun and not ended: {', '.join(begun.elements())}")
    failed = [
        f"{name}: {' '.join(reason.split())[:300]}"
        for outcome, name, reason in told
        if outcome == "failed"
    ]
    return TestsRun(
        passed=outcomes["passed"], skipped=outcomes["skipped"], failed=[*failed, *reasons]
    )
