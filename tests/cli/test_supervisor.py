"""The supervisor with real child processes that stand in for services."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.processes.supervisor import Policy, ProcessSpec, StartError, Supervisor

pytestmark = pytest.mark.stand_in
FAST = Policy(
    start_timeout_s=60,
    stop_timeout_s=60,
    first_backoff_s=0.01,
    max_backoff_s=0.03,
    healthy_after_s=60,
)


Start = Callable[..., Supervisor]
Service = Callable[[str], ProcessSpec]


class Reports:
    """The lines that a supervisor reported, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, line: str) -> None:
        self._queue.put_nowait(line)

    async def until(self, text: str) -> str:
        while text not in (line := await self._queue.get()):
            pass
        return line


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    def make(name: str) -> ProcessSpec:
        script = tmp_path / f"{name}.py"
        shutil.copy(Path(__file__).with_name("stand_in_service.py"), script)
        return ProcessSpec(name=name, command=[sys.executable, "-S", str(script)])

    return make


@pytest.fixture
async def supervisor(reports: Reports) -> AsyncIterator[Start]:
    made: list[Supervisor] = []

    def make(policy: Policy = FAST) -> Supervisor:
        made.append(Supervisor(reports, policy))
        return made[-1]

    yield make
    for left in made:
        left.kill()
        await left.stop()


async def connects(address: str) -> bool:
    host, port = address.split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_a_started_service_has_the_address_of_its_ready_line(
    supervisor: Start, service: Service, reports: Reports
) -> None:
    [addresses] = await supervisor().start([service("drafter")])
    assert addresses["grpc"].startswith("127.0.0.1:")
    assert not addresses["grpc"].endswith(":0")
    assert await connects(addresses["grpc"])
    assert await reports.until("printed") == "drafter printed: hello from drafter"


async def test_a_service_that_dies_is_started_again_on_its_address(
    supervisor: Start, service: Service, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    [addresses] = await supervisor().start([service("drafter")])
    await reports.until("serves at")
    os.kill(pid_of("drafter", capfd), signal.SIGKILL)
    assert await reports.until("again") == (
        "drafter was killed by SIGKILL; starting it again in 0.01 s"
    )
    assert await reports.until("serves at") == f"drafter serves at {addresses['grpc']}"
    assert await connects(addresses["grpc"])


async def test_restarts_are_tried_with_growing_bounded_backoff_until_one_succeeds(
    supervisor: Start,
    service: Service,
    reports: Reports,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    [addresses] = await supervisor().start([service("drafter")])
    (tmp_path / "drafter.fails").touch()
    os.kill(pid_of("drafter", capfd), signal.SIGKILL)
    assert (await reports.until("again")).endswith("in 0.01 s")
    failed = "drafter exited with status 3 before it was ready; starting it again in"
    assert await reports.until("again") == f"{failed} 0.02 s"
    assert await reports.until("again") == f"{failed} 0.03 s"
    assert await reports.until("again") == f"{failed} 0.03 s"
    (tmp_path / "drafter.fails").unlink()
    assert await reports.until("serves at") == f"drafter serves at {addresses['grpc']}"


async def test_a_service_that_fails_at_first_is_an_error_and_not_tried_again(
    supervisor: Start, service: Service, tmp_path: Path
) -> None:
    (tmp_path / "drafter.fails").touch()
    with pytest.raises(StartError, match="drafter exited with status 3 before it was ready"):
        await supervisor().start([service("drafter"), service("verifier")])


async def test_a_service_that_is_never_ready_is_an_error_and_killed(
    supervisor: Start, service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drafter.silent").touch()
    hasty = dataclasses.replace(FAST, start_timeout_s=4)
    with pytest.raises(StartError, match=r"drafter was not ready within 4 s"):
        await supervisor(hasty).start([service("drafter")])
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of("drafter", capfd), 0)


async def test_a_service_that_ignores_sigterm_is_killed_after_the_bound(
    supervisor: Start,
    service: Service,
    reports: Reports,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "drafter.stubborn").touch()
    running = supervisor(dataclasses.replace(FAST, stop_timeout_s=0.2))
    await running.start([service("drafter")])
    pid = pid_of("drafter", capfd)
    await running.stop()
    assert await reports.until("did not stop") == "drafter did not stop within 0.2 s; killing it"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def log_entries(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The log entries of the stand-ins since the last call."""
    return [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]


def pid_of(name: str, capfd: pytest.CaptureFixture[str]) -> int:
    """The process id of the latest start of this stand-in, which must be ready."""
    return [
        int(line["pid"])
        for line in log_entries(capfd)
        if line["stand_in"] == name and line["event"] == "started"
    ][-1]
