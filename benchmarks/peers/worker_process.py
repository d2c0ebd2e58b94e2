"""A worker's process as the benchmark sees it: requests, answers, memory, end."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.protocol import Options, Request
from benchmarks.services import REPOSITORY

STOP_TIMEOUT_S = 60.0


class PeerError(Exception):
    """A worker reported an error, or ended; it cannot be measured in this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Output tokens of each request, and how long the worker took for all."""

    token_ids: list[list[int]]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(tokens) for tokens in self.token_ids) / self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of a worker and all processes that it started."""

    # Shared pages by halves, thirds, ...; at the time of the call.
    pss_bytes: int
    # Sum of each process's highest resident size; shared pages count in each.
    peak_rss_bytes: int


class WorkerProcess:
    """A started worker. One call at a time."""

    def __init__(self, process: subprocess.Popen[str], started_at_s: float, log: Path) -> None:
        self._process = process
        self._log = log
        self.started_at_s = started_at_s

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, mode: str, requests: Sequence[Request], streams: int) -> Answers:
        """Runs all requests, `streams` at a time.

        Raises:
            PeerError: the worker answered with an error, or ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        tasks = [asdict(request) for request in requests]
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(
                json.dumps({"mode": mode, "streams": streams, "tasks": tasks}) + "\n"
            )
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"ended with status {self._process.wait()}: see {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return Answers(token_ids=answer["answers"], duration_s=answer["duration_s"])

    def memory(self) -> Memory:
        processes = [self._process.pid, *_descendants(self._process.pid)]
        return Memory(
            pss_bytes=sum(_field(pid, "smaps_rollup", "Pss:") for pid in processes),
            peak_rss_bytes=sum(_field(pid, "status", "VmHWM:") for pid in processes),
        )


@contextlib.contextmanager
def running_worker(
    python: Path, worker: str, options: Options, log: Path
) -> Iterator[WorkerProcess]:
    """Starts a worker; ends it, and what it started, on exit. Its messages go to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started_at_s = time.perf_counter()
    with (
        log.open("w") as messages,
        subprocess.Popen(
            [str(python), "-m", f"benchmarks.peers.workers.{worker}", options.to_json()],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            # So that what a killed worker leaves can be found.
            start_new_session=True,
        ) as process,
    ):
        try:
            yield WorkerProcess(process, started_at_s, log)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


def _field(pid: int, file: str, name: str) -> int:
    """Returns a field of /proc, given there in kB, in bytes."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{name} is not in /proc/{pid}/{file}")
