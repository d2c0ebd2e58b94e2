"""Runs pytest, then once more the few tests that failed, alone.

    python -m tests.second_try [OPTIONS OF PYTEST]

A noisy machine can fail a sound test. Tests that pass only at the second try are named at the end:
each has a fault, to be mended. Whatever else goes wrong is final at once: a process that crashes, a
file that cannot be imported, many failures.
"""

import subprocess
import sys

import pytest

MAX_FAILED = 3


class Failures:
    """Of a run, also of one in several processes.

    Attributes:
        node_ids: the tests that failed, in order.
        are_final: whether something else failed than a test's own code.
    """

    def __init__(self) -> None:
        self.node_ids: list[str] = []
        self.are_final = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.node_ids:
            self.node_ids.append(report.nodeid)
        # Else it is pytest-xdist's report of a process that died.
        self.are_final |= report.when not in ("setup", "call", "teardown")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.are_final |= report.failed


def main(options: list[str]) -> int:
    """Returns pytest's exit code; 0 if every test passed at one of its tries."""
    failures = Failures()
    code = pytest.main(options, plugins=[failures])
    if (
        code != pytest.ExitCode.TESTS_FAILED
        or failures.are_final
        or not 0 < len(failures.node_ids) <= MAX_FAILED
    ):
        return int(code)
    print("== second try", flush=True)
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", *failures.node_ids]
    if code := subprocess.run(command, check=False).returncode:
        return code
    print(f"passed only at the second try: {', '.join(failures.node_ids)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
