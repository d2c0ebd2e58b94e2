"""A worker's process as the benchmark sees it: requests, answers, end."""

import contextlib
import json
import os
import signal
import subprocess
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


class WorkerProcess:
    """A started worker. One call at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

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


@contextlib.contextmanager
def running_worker(
    python: Path, worker: str, options: Options, log: Path
) -> Iterator[WorkerProcess]:
    """Starts a worker's module; ends it, and what it started, on exit. Its messages go to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as messages,
        subprocess.Popen(
            [str(python), "-m", worker, options.to_json()],
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
            yield WorkerProcess(process, log)
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
