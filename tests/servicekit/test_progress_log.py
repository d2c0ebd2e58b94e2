"""Long starts say how far they are; short ones say nothing."""

import pytest
import structlog
from numba import njit

from servicekit import progress_log
from servicekit.kernels.compile_log import compilations_logged
from servicekit.progress_log import INTERVAL_S, ProgressLog


def test_lines_come_after_a_while_and_are_as_far_apart() -> None:
    now_s = 100.0
    with structlog.testing.capture_logs() as log:
        progress = ProgressLog("weights", structlog.get_logger(), clock=lambda: now_s)
        for percent in range(100):
            now_s += INTERVAL_S / 10
            progress.show(percent=percent)
    assert [entry["percent"] for entry in log] == list(range(9, 100, 10))
    assert {(entry["event"], entry["part"]) for entry in log} == {("loading", "weights")}


def test_what_is_over_soon_has_no_line() -> None:
    now_s = 0.0
    with structlog.testing.capture_logs() as log:
        progress = ProgressLog("weights", structlog.get_logger(), clock=lambda: now_s)
        now_s = INTERVAL_S / 2
        progress.show(percent=100)
    assert log == []


def test_compiled_kernels_are_counted_while_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_log, "INTERVAL_S", 0.0)

    def compile_one() -> None:
        njit(lambda x: x + 1)(1)

    with structlog.testing.capture_logs() as log:
        with compilations_logged(structlog.get_logger()):
            compile_one()
            compile_one()
        compile_one()
    assert [(entry["part"], entry["compiled"]) for entry in log] == [("kernels", 1), ("kernels", 2)]
