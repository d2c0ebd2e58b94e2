"""Starts Tandem's services as processes on free ports, for benchmarks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tandem.cli.processes.death_with_parent import dying_with_parent
from tandem.free_ports import free_port
from tandem.ready_line import parse_ready_line

REPOSITORY = Path(__file__).resolve().parents[1]
STOP_TIMEOUT_S = 30.0

# On Linux, the kernel kills a service when the thread that started it ends: this thread ends with
# the process, however that ends.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")


class ServiceError(Exception):
    """A service did not become ready; the message contains its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running process: its addresses, HOST:PORT each; `http` is a gateway's."""

    address: str
    metrics: str
    process: "subprocess.Popen[str]"
    http: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid


@contextlib.contextmanager
def running_stack(
    *,
    model: Path,
    verifier_flags: Sequence[str] = (),
    verifier_module: str = "verifier",
    num_verifiers: int = 1,
    num_drafters: int = 1,
    serves_text: bool = True,
) -> Iterator[Service]:
    """Drafters, verifiers, and one gateway, which it yields; stopped on exit.

    Args:
        verifier_module: runs as the verifiers.
        num_verifiers, num_drafters: how many.
        serves_text: whether the gateway has the model's tokenizer.

    Raises:
        ServiceError: one of them ended before it was ready.
    """
    with contextlib.ExitStack() as stack:

        def start(module: str, *flags: str) -> Service:
            return stack.enter_context(running_process(module, *flags))

        drafters = ",".join(start("drafter").address for _ in range(num_drafters))
        verifiers = [
            start(
                verifier_module,
                *("--model", str(model), "--drafters", drafters),
                *verifier_flags,
            )
            for _ in range(num_verifiers)
        ]
        yield start(
            "gateway",
            *("--http-listen", "127.0.0.1:0"),
            *(("--tokenizer", str(model)) if serves_text else ()),
            *("--drafters", drafters),
            *("--verifiers", ",".join(each.address for each in verifiers)),
        )


@contextlib.contextmanager
def running_process(
    module: str,
    *flags: str,
    listen: str = "127.0.0.1:0",
    metrics_listen: str | None = None,
    log: Path | None = None,
    log_level: str = "warning",
) -> Iterator[Service]:
    """Runs a module that prints a ready line; stopped on exit, and on Linux killed with us.

    Args:
        listen, metrics_listen: its addresses; a free port each by default.
        log: the file that its stderr is appended to; this process's stderr if None.

    Raises:
        ServiceError: it ended before it was ready.
    """
    metrics = metrics_listen or f"127.0.0.1:{free_port()}"
    with (
        contextlib.nullcontext() if log is None else log.open("a") as stderr,
        start_process(
            [
                *(sys.executable, "-m", module, "--listen", listen),
                *("--metrics-listen", metrics, "--log-level", log_level, *flags),
            ],
            stderr,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            addresses = parse_ready_line(process.stdout.readline())
            if addresses is None:
                told = "" if log is None else f": {log.read_text()[-4000:]}"
                raise ServiceError(
                    f"{module} ended before it was ready (status {process.wait()}){told}"
                )
            yield Service(
                address=addresses["grpc"],
                metrics=metrics,
                process=process,
                http=addresses.get("http", ""),
            )
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def start_process(command: Sequence[str], stderr: TextIO | int | None) -> "subprocess.Popen[str]":
    """Starts a command that the kernel kills when this process has ended; its stdout is a pipe."""
    return _starter.submit(
        subprocess.Popen,
        dying_with_parent(command),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ).result()
