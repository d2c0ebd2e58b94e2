"""Runs the rows in a process of their own, and another one when that ends or takes too long."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.worker import MARK
from benchmarks.ratios import Interval
from benchmarks.services import REPOSITORY
from benchmarks.serving.turns import Goal, Measure

_LONGEST_LINE_BYTES = 1 << 20
_STOP_TIMEOUT_S = 10.0
# Of a process's start, or of one load: an 8B checkpoint is written in 30 s on a fast disk.
LOADING_S = 150.0
WORKER = "benchmarks.gpu.worker"


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Measures rows; none keeps the others from being measured."""

    device: str
    folder: Path
    is_quick: bool
    # By time.monotonic(): no row begins or goes on after it.
    end_s: float
    # Called with each measure; one without a value says why.
    keep: Callable[[Measure], None]
    module: str = WORKER
    machine: str = "unknown"
    failed: list[str] = field(default_factory=list)

    async def run(self, rows: Sequence[str]) -> None:
        pending = list(rows)
        while pending:
            if time.monotonic() >= self.end_s:
                self._give_up(pending.pop(0), "the time for all rows is over")
                continue
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.module, "--device", self.device),
                *("--folder", str(self.folder), "--rows", *pending),
                *(["--quick"] if self.is_quick else []),
                cwd=REPOSITORY,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE_BYTES,
                # A group, so that services that a row has started end with it.
                start_new_session=True,
            )
            try:
                await self._follow(process, pending)
            finally:
                await end(process)

    async def _follow(self, process: asyncio.subprocess.Process, pending: list[str]) -> None:
        """Takes from `pending` what the process measures, until it cannot go on."""
        # Of the row, without its loading before.
        started_at_s = loads_since_s = time.monotonic()
        # Starting the process is loading, too.
        loads = True
        while pending:
            end_s = loads_since_s + LOADING_S if loads else started_at_s + ROWS[pending[0]].most_s
            try:
                # Unlike `wait_for`, it loses no cancellation that comes with the message.
                async with asyncio.timeout(max(0.0, min(end_s, self.end_s) - time.monotonic())):
                    message = await _message(process)
            except TimeoutError:
                duration_s = time.monotonic() - (loads_since_s if loads else started_at_s)
                what = "not loaded" if loads else "not done"
                self._give_up(pending.pop(0), f"{what} after {duration_s:.0f} s")
                return
            if message is None:
                status = await process.wait()
                self._give_up(pending.pop(0), f"its process ended with status {status}")
                return
            if "machine" in message:
                self.machine = message["machine"]
                loads, started_at_s = False, time.monotonic()
                continue
            if "loads" in message:
                loads, now_s = message["loads"], time.monotonic()
                if loads:
                    loads_since_s = now_s
                else:
                    started_at_s += now_s - loads_since_s
                continue
            assert message["row"] == pending[0], "rows are measured in order"
            if "measure" in message:
                self.keep(measure_of(message["measure"]))
                continue
            name = pending.pop(0)
            started_at_s = time.monotonic()
            if message["error"] is not None:
                self._give_up(name, message["error"])
            if message["is_last"]:
                return

    def _give_up(self, name: str, reason: str) -> None:
        self.failed.append(name)
        note = f"not measured: {' '.join(reason.split())[:300]}"
        self.keep(Measure(row=name, what="", streams=0, dtype="", value=None, note=note))


def measure_of(read: dict[str, Any]) -> Measure:
    """A measure that came as JSON."""
    value, goal = read["value"], read["goal"]
    return Measure(
        **read
        | {
            "value": None if value is None else Interval(**value),
            "goal": None if goal is None else Goal(**goal),
        }
    )


async def _message(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """The next object that the process prints; None: it has ended. Libraries may print, too."""
    assert process.stdout is not None
    while line := (await process.stdout.readline()).decode(errors="replace"):
        if line.startswith(MARK):
            message: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return message
    return None


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends the leader of a process group and all that it has started, even if cancelled."""
    try:
        await _end_by(process, signal.SIGTERM)
    finally:
        await _end_by(process, signal.SIGKILL)


async def _end_by(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
