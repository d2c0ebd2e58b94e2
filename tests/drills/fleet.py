"""The services as real processes that can be killed, frozen, cut off and started again.

                    Fleet.links_to_verifiers        Fleet.link_to_drafter
    client ── gateway ═══════════════════ verifier ═══════════════════ drafter

Owns the processes, their logs and the links. A process keeps its addresses when it starts again.
Blocking methods begin with `start` and `stop`; `Fleet` itself belongs to no event loop.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.metrics import Snapshot, read_metrics
from benchmarks.services import STOP_TIMEOUT_S, Service, running_process
from benchmarks.workloads import BUNDLED_MODEL
from tandem.free_ports import free_port
from tests.drills.link import Link, running_link

#: K/V blocks of a verifier: 5,120 tokens.
NUM_KV_BLOCKS = 320


class Member:
    """One process of the fleet, across its restarts.

    Attributes:
        name: e.g. "verifier-0".
        log: the file of its stderr.
    """

    def __init__(self, name: str, module: str, flags: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._module = module
        self._flags = flags
        self._listen = f"127.0.0.1:{free_port()}"
        self._metrics = f"127.0.0.1:{free_port()}"
        self._exits = contextlib.ExitStack()
        self._service: Service | None = None

    @property
    def address(self) -> str:
        """HOST:PORT of its gRPC."""
        return self._listen

    @property
    def pid(self) -> int:
        assert self._service is not None, f"{self.name} was never started"
        return self._service.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended; a frozen one has not."""
        return self.status is None

    @property
    def status(self) -> int | None:
        """The exit status; 0 if it was never ready, None while the process runs."""
        return 0 if self._service is None else self._service.process.poll()

    def start(self, *, module: str | None = None) -> None:
        """Starts the process, and returns when it serves.

        Args:
            module: runs in its place; its own if None.

        Raises:
            ServiceError: it ended before it was ready.
        """
        self._service = self._exits.enter_context(
            running_process(
                module or self._module,
                *self._flags,
                listen=self._listen,
                metrics_listen=self._metrics,
                log=self.log,
                log_level="info",
            )
        )

    def stop(self) -> int:
        """Ends the process with SIGTERM, or after a long time SIGKILL; returns its exit status.

        0 if it was never ready.
        """
        if self._service is None:
            return 0
        self.thaw()
        self._exits.close()
        status = self._service.process.returncode
        assert status is not None, "waited for"
        return status

    def wait(self) -> int:
        """Waits until the process has ended by itself, or a long time; returns its exit status."""
        assert self._service is not None, f"{self.name} was never started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._service.process.wait(STOP_TIMEOUT_S)
        return self.stop()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Asks it to end, and does not wait."""
        self._signal(signal.SIGTERM)

    def metrics(self) -> Snapshot:
        """What it exports now.

        Raises:
            OSError: it does not answer.
        """
        return read_metrics(self._metrics)

    def log_lines(self, *, since: int = 0) -> list[dict[str, Any]]:
        """Its log lines from an offset of the file on; what is no JSON is an error's text."""
        with self.log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
        parsed = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            is_entry = isinstance(entry, dict)
            parsed.append(entry if is_entry else {"level": "error", "event": line})
        return parsed

    def log_size(self) -> int:
        return self.log.stat().st_size

    def logged_errors(self, *, since: int = 0) -> list[str]:
        """Its log lines at level error or above, and lines of tracebacks and crashes."""
        return [
            str(line)
            for line in self.log_lines(since=since)
            if line.get("level") not in ("debug", "info", "warning")
        ]

    def _signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)


@dataclass(slots=True, kw_only=True)
class Fleet:
    """One drafter, two verifiers, two gateways, and the links between them.

    Attributes:
        stall_file: stalls the engine of the last verifier while it exists.
        gateway_flags: of every gateway, without `--verifiers`.
        folder: of the logs.
    """

    drafter: Member
    verifiers: list[Member]
    gateways: list[Member]
    link_to_drafter: Link
    links_to_verifiers: list[Link] = field(default_factory=list)
    stall_file: Path
    gateway_flags: Sequence[str]
    folder: Path

    @property
    def members(self) -> list[Member]:
        """All processes, those first that others need."""
        return [self.drafter, *self.verifiers, *self.gateways]

    @property
    def addresses(self) -> str:
        """Where the gateways reach the verifiers, as they are told."""
        return ",".join(link.address for link in self.links_to_verifiers)

    @contextlib.contextmanager
    def another_gateway(
        self, *flags: str, verifiers: str | None = None, module: str = "gateway"
    ) -> Iterator[Member]:
        """A gateway that is no member, with flags of its own; stopped on exit.

        Args:
            verifiers: its `--verifiers`; those of the fleet if None.
            module: runs as the gateway.
        """
        flags = (*self.gateway_flags, *flags, "--verifiers", verifiers or self.addresses)
        gateway = Member("another-gateway", module, flags, self.folder)
        try:
            gateway.start()
            yield gateway
        finally:
            gateway.stop()


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Starts a fleet with the bundled model; stops it on exit.

    Args:
        folder: for the logs.

    Raises:
        ServiceError: a process ended before it was ready.
    """
    with contextlib.ExitStack() as exits:
        stall_file = folder / "stall"
        drafter = Member("drafter", "drafter", (), folder)
        link_to_drafter = exits.enter_context(running_link(drafter.address))
        verifier_flags = (
            *("--model", str(BUNDLED_MODEL), "--threads", "1", "--max-num-seqs", "16"),
            *("--num-kv-blocks", str(NUM_KV_BLOCKS), "--drafters", link_to_drafter.address),
            # Too short for its sequences to end: they move.
            *("--drain-timeout-s", "0.2"),
        )
        verifiers = [
            Member("verifier-0", "verifier", verifier_flags, folder),
            Member(
                "verifier-1",
                "tests.drills.stalling_verifier",
                (*verifier_flags, "--stall-file", str(stall_file)),
                folder,
            ),
        ]
        links = [exits.enter_context(running_link(verifier.address)) for verifier in verifiers]
        gateway_flags = (
            *("--http-listen", "127.0.0.1:0", "--tokenizer", str(BUNDLED_MODEL)),
            *("--drafters", link_to_drafter.address),
        )
        flags = (*gateway_flags, "--verifiers", ",".join(link.address for link in links))
        gateways = [Member(f"gateway-{i}", "gateway", flags, folder) for i in range(2)]
        fleet = Fleet(
            drafter=drafter,
            verifiers=verifiers,
            gateways=gateways,
            link_to_drafter=link_to_drafter,
            links_to_verifiers=links,
            stall_file=stall_file,
            gateway_flags=gateway_flags,
            folder=folder,
        )
        exits.callback(lambda: stall_file.unlink(missing_ok=True))
        for tier in ([drafter, *verifiers], gateways):
            for member in tier:
                exits.callback(member.stop)
            with ThreadPoolExecutor() as starts:
                list(starts.map(Member.start, tier))
        yield fleet
