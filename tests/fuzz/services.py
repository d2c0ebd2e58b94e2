"""Runs the services as processes, and reads errors from their logs.

Their bounds are small, so that a short campaign reaches them.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.services import ServiceError, running_process
from benchmarks.workloads import BUNDLED_MODEL
from tests.fuzz.messages import ABSENT_DRAFTER

_DRAFTER_FLAGS = (
    *("--max-sequences", "1000"),
    *("--max-history-bytes", str(32 << 20), "--max-sequence-bytes", str(8 << 20)),
    *("--max-pools-bytes", str(16 << 20), "--max-pool-bytes", str(4 << 20)),
)
_VERIFIER_FLAGS = (
    *("--model", str(BUNDLED_MODEL), "--threads", "1", "--num-kv-blocks", "1024"),
    # Sequences that always wait for drafts time out soon.
    *("--draft-idle-timeout-s", "2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzedService:
    """One running service.

    Attributes:
        name: the module.
        address: of gRPC, HOST:PORT.
        metrics: address of the metrics, HOST:PORT.
        process: the process.
        log: the file with its stderr.
    """

    name: str
    address: str
    metrics: str
    process: "subprocess.Popen[str]"
    log: Path

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def logged_errors(self) -> list[str]:
        """Log lines at level error or above, and lines of tracebacks and crashes."""
        errors = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                level = json.loads(line)["level"]
            except (ValueError, TypeError, KeyError):
                level = "error"
            if level not in ("debug", "info", "warning"):
                errors.append(line)
        return errors


@contextlib.contextmanager
def running_services(folder: Path) -> Iterator[list[FuzzedService]]:
    """A drafter, a verifier with the bundled model and a gateway, on free ports; stopped on exit.

    Args:
        folder: for their logs.

    Raises:
        ServiceError: a service ended before it was ready, or did not end properly.
    """
    with contextlib.ExitStack() as stack:
        drafter = stack.enter_context(_running(folder, "drafter", *_DRAFTER_FLAGS))
        drafters = f"{drafter.address},{ABSENT_DRAFTER}"
        verifier = stack.enter_context(
            _running(folder, "verifier", "--drafters", drafters, *_VERIFIER_FLAGS)
        )
        gateway = stack.enter_context(
            _running(
                folder,
                "gateway",
                *("--http-listen", "127.0.0.1:0", "--tokenizer", str(BUNDLED_MODEL)),
                *("--drafters", drafter.address, "--verifiers", verifier.address),
            )
        )
        yield [drafter, verifier, gateway]


@contextlib.contextmanager
def _running(folder: Path, name: str, *flags: str) -> Iterator[FuzzedService]:
    log = folder / f"{name}.log"
    with running_process(name, *flags, log=log) as service:
        yield FuzzedService(
            name=name,
            address=service.address,
            metrics=service.metrics,
            process=service.process,
            log=log,
        )
    if service.process.returncode:
        raise ServiceError(f"{name} ended with status {service.process.returncode}")
