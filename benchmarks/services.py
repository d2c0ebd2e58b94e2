"""Starts Tandem's services as processes on free ports, for benchmarks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STOP_TIMEOUT_S = 30.0


class ServiceError(Exception):
    """A service did not become ready; the message contains its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Addresses of the running services, HOST:PORT each."""

    gateway: str
    verifier: str
    drafter: str


@contextlib.contextmanager
def running_stack(
    *, model: Path, verifier_flags: Sequence[str] = (), gateway_flags: Sequence[str] = ()
) -> Iterator[Stack]:
    """One drafter, one verifier, one gateway; stopped on exit.

    Raises:
        ServiceError: one of them ended before it was ready.
    """
    with contextlib.ExitStack() as stack:
        drafter = stack.enter_context(running_service("drafter"))
        verifier = stack.enter_context(
            running_service("verifier", "--model", str(model), *verifier_flags)
        )
        gateway = stack.enter_context(
            running_service(
                "gateway",
                *("--http-listen", "127.0.0.1:0", "--tokenizer", str(model)),
                *("--drafters", drafter, "--verifiers", verifier),
                *gateway_flags,
            )
        )
        yield Stack(gateway=gateway, verifier=verifier, drafter=drafter)


@contextlib.contextmanager
def running_service(service: str, *flags: str) -> Iterator[str]:
    """Runs a service, or another module that prints a ready line; yields its address."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", service, "--listen", "127.0.0.1:0"),
            *("--metrics-listen", "127.0.0.1:0", "--log-level", "warning", *flags),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise ServiceError(f"{service} ended before it was ready (status {process.wait()})")
            yield dict(part.split("=", 1) for part in line.split()[1:])["grpc"]
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
