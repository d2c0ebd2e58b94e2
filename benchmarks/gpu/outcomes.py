"""A plugin of pytest that writes each outcome at once: what is known stays known when pytest is
ended, or ends by a fault of a device's library.

Each line of `--outcomes FILE` is a JSON array: "begun", "passed", "skipped" or "failed"; the test's
name; and why, if it failed.
"""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # Not a `Path`, which xdist could not send to its processes.
    parser.addoption("--outcomes")


def pytest_configure(config: pytest.Config) -> None:
    # Processes of xdist tell the one that writes.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(Path(config.getoption("--outcomes"))))


class _Outcomes:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begun", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or is skipped."""
        if not report.passed:
            self._report(report)

    def _report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else report.longreprtext
        # Short, so that a line is written whole.
        reason = reason[:1000] if report.failed else ""
        self._write(report.outcome, report.nodeid, reason)

    def _write(self, outcome: str, nodeid: str, reason: str = "") -> None:
        line = [outcome, nodeid.rpartition("::")[2], reason]
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
