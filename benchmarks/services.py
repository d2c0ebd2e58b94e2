"""Starts Tandem's services as processes on free ports, for benchmarks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tandem.cli.death_with_parent import dying_with_parent
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Addresses of the running services, HOST:PORT each; processes by the service's name."""

    gateway: str
    verifier: str
    drafter: str
    services: Mapping[str, Service]


@contextlib.contextmanager
def running_stack(
    *,
    model: Path,
    verifier_flags: Sequence[str] = (),
    verifier_module: str = "verifier",
    num_verifiers: int = 1,
    serves_text: bool = True,
    delays_drafter: bool = False,
    cores: Mapping[str, int] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """One drafter, one gateway, and verifiers, of which `Stack` has the first; stopped on exit.

    Args:
        verifier_module: runs as the verifiers.
        serves_text: whether the gateway has the model's tokenizer.
        delays_drafter: whether `benchmarks.delay_proxy` stands before the drafter;
            `Stack.drafter` is then its address.
        cores: the core of each service by its name; the others run where they like.
        variables: of the services' environment, beside this process's.

    Raises:
        ServiceError: one of them ended before it was ready.
    """
    cores = cores or {}
    with contextlib.ExitStack() as stack:

        def start(name: str, module: str, *flags: str) -> Service:
            return stack.enter_context(
                running_process(module, *flags, core=cores.get(name), variables=variables)
            )

        services = {"drafter": start("drafter", "drafter")}
        drafter = services["drafter"].address
        if delays_drafter:
            services["proxy"] = start("proxy", "benchmarks.delay_proxy", "--to", drafter)
            drafter = services["proxy"].address
        verifiers = [
            start(
                "verifier",
                verifier_module,
                *("--model", str(model), "--drafters", drafter),
                *verifier_flags,
            )
            for _ in range(num_verifiers)
        ]
        services["verifier"] = verifiers[0]
        services["gateway"] = gateway = start(
            "gateway",
            "gateway",
            *("--http-listen", "127.0.0.1:0"),
            *(("--tokenizer", str(model)) if serves_text else ()),
            *("--drafters", drafter, "--verifiers", ",".join(each.address for each in verifiers)),
        )
        yield Stack(
            gateway=gateway.address,
            verifier=verifiers[0].address,
            drafter=drafter,
            services=services,
        )


@contextlib.contextmanager
def running_service(service: str, *flags: str) -> Iterator[str]:
    """Runs a service, or another module that prints a ready line; yields its address."""
    with running_process(service, *flags) as process:
        yield process.address


@contextlib.contextmanager
def running_process(
    module: str,
    *flags: str,
    core: int | None = None,
    listen: str = "127.0.0.1:0",
    metrics_listen: str | None = None,
    log: Path | None = None,
    log_level: str = "warning",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Service]:
    """Runs a module that prints a ready line; stopped on exit, and on Linux killed with us.

    Args:
        core: runs on this core alone; where it likes if None.
        listen, metrics_listen: its addresses; a free port each by default.
        log: the file that its stderr is appended to; this process's stderr if None.
        variables: of its environment, beside this process's.

    Raises:
        ServiceError: it ended before it was ready.
    """
    metrics = metrics_listen or f"127.0.0.1:{free_port()}"
    pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
    with (
        contextlib.nullcontext() if log is None else log.open("a") as stderr,
        _start(
            [
                *(*pinned, sys.executable, "-m", module, "--listen", listen),
                *("--metrics-listen", metrics, "--log-level", log_level, *flags),
            ],
            stderr=stderr,
            variables=variables or {},
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


def _start(
    command: Sequence[str], *, stderr: TextIO | None, variables: Mapping[str, str]
) -> "subprocess.Popen[str]":
    """Starts a command that the kernel kills when this process has ended."""
    return _starter.submit(
        subprocess.Popen,
        dying_with_parent(command),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ).result()
