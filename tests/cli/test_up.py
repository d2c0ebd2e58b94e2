"""`tandem up` as a process, with stand-ins for the services it starts as `python -m NAME`."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main, up
from tandem.cli.processes import topology as topology_module
from tandem.cli.processes.live_output import LiveOutput
from tandem.cli.processes.topology import Device, Ports, Topology
from tandem.ready_line import parse_ready_line

pytestmark = pytest.mark.stand_in
REPOSITORY = Path(__file__).resolve().parents[2]


class RunningUp:
    """One `tandem up`, and what it and its stand-ins wrote to stderr, in order."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.reported: list[str] = []

    async def ready(self) -> dict[str, str]:
        assert self.process.stdout is not None
        addresses = parse_ready_line((await self.process.stdout.readline()).decode())
        assert addresses is not None, "no ready line on stdout"
        return addresses

    async def until_logged(self, service: str, event: str, *, times: int = 1) -> dict[str, Any]:
        """The latest of at least `times` log entries of a stand-in with this event."""
        while True:
            found = [
                entry
                for entry in self.log
                if entry["stand_in"] == service and entry["event"] == event
            ]
            if len(found) >= times:
                return found[-1]
            assert await self._read_line(), f"{service} never logged {event}"

    async def until_reported(self, text: str) -> str:
        while True:
            for line in self.reported:
                if text in line:
                    return line
            assert await self._read_line(), f"never reported {text}"

    async def ended(self) -> int:
        """Waits until all processes that write to stderr have ended; returns the exit code."""
        while await self._read_line():
            pass
        return await self.process.wait()

    async def _read_line(self) -> bool:
        assert self.process.stderr is not None
        line = (await self.process.stderr.readline()).decode()
        if line.startswith('{"stand_in"'):
            self.log.append(json.loads(line))
        else:
            self.reported.append(line.rstrip())
        return bool(line)


@contextlib.asynccontextmanager
async def running_up(
    folder: Path, *options: str, stderr: int = asyncio.subprocess.PIPE
) -> AsyncIterator[RunningUp]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tandem", "up", "--model", str(folder / "model")),
        *("--port", "0", "--http-port", "0"),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        # `python -m` looks in the working folder first, so the stand-ins come before the services.
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"},
    )
    try:
        yield RunningUp(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_gateway_and_verifiers_get_the_addresses_that_the_others_serve_at(
    folder: Path,
) -> None:
    async with running_up(folder, "--num-drafters", "2", "--num-verifiers", "2") as running:
        addresses = await running.ready()
        for name in ("drafter-0", "drafter-1", "verifier-0", "verifier-1"):
            await running.until_reported(f"{name} serves at")
        argv = (await running.until_logged("gateway", "started"))["argv"]
        drafters, verifiers = option(argv, "--drafters"), option(argv, "--verifiers")
        assert len(set(drafters.split(","))) == 2
        assert len(set(verifiers.split(","))) == 2
        for times in (1, 2):
            verifier = await running.until_logged("verifier", "started", times=times)
            assert option(verifier["argv"], "--drafters") == drafters
        assert option(argv, "--tokenizer") == str(folder / "model")
        served_at = [*drafters.split(","), *verifiers.split(",")]
        for served in [*served_at, *addresses.values()]:
            assert await accepts(served)
        watch = await running.until_reported("metrics at")
        shown = watch.split()[-5:]
        # Plaintext and without a token, whatever the gateway's HTTP port speaks.
        assert shown[0] == option(argv, "--metrics-listen")
        assert len({*shown, *served_at}) == len(shown) + len(served_at)
        assert set(addresses) == {"grpc", "http"}
        reported = [line for line in running.reported if "serves at" in line]
        assert f"tandem up: drafter-0 serves at {drafters.split(',')[0]}" in reported
        assert f"tandem up: verifier-1 serves at {verifiers.split(',')[1]}" in reported


async def test_flags_reach_the_verifier_and_only_when_given(folder: Path) -> None:
    allowed = {"--allow-trace", "--allow-structured-output"}
    async with running_up(folder) as running:
        argv = (await running.until_logged("verifier", "started"))["argv"]
        assert option(argv, "--model") == str(folder / "model")
        assert not {"--device", "--dtype", *allowed} & set(argv)
        await running.ready()
    async with running_up(folder, "--device", "cpu", "--dtype", "bfloat16", *allowed) as running:
        argv = (await running.until_logged("verifier", "started"))["argv"]
        assert (option(argv, "--device"), option(argv, "--dtype")) == ("cpu", "bfloat16")
        assert allowed <= set(argv)
        assert "--allow-trace" in (await running.until_logged("gateway", "started"))["argv"]
        await running.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_gateway_then_the_others_and_is_success(
    folder: Path, number: signal.Signals
) -> None:
    async with running_up(folder) as running:
        await running.ready()
        running.process.send_signal(number)
        assert await running.ended() == 0
    stopping = [entry["stand_in"] for entry in running.log if entry["event"] == "stopping"]
    assert stopping[0] == "gateway"
    assert sorted(stopping) == ["drafter", "gateway", "verifier"]


async def test_a_signal_during_the_start_stops_what_was_started(folder: Path) -> None:
    (folder / "verifier.silent").touch()
    async with running_up(folder) as running:
        await running.until_reported("drafter-0 serves")
        verifier = await running.until_logged("verifier", "started")
        # It blocks SIGTERM and never ends, so that only a second signal stops it.
        running.process.terminate()
        await running.until_reported("stopping")
        running.process.terminate()
        assert await running.ended() == 0
        assert gone(verifier["pid"])


async def test_logs_are_read_on_when_their_terminal_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        async with LiveOutput(["drafter-0"]) as output:
            assert output.log_descriptors is not None
            os.close(master)
            # More than a pipe holds.
            lines = (b"x" * 999 + b"\n") * 200
            writing = threading.Thread(
                target=os.write, args=(output.log_descriptors["drafter-0"], lines), daemon=True
            )
            writing.start()
            await asyncio.to_thread(writing.join, 20.0)
            assert not writing.is_alive()
        monkeypatch.undo()


async def test_nothing_outlives_a_killed_tandem_up(folder: Path) -> None:
    async with running_up(folder) as running:
        await running.ready()
        pids = [
            (await running.until_logged(name, "started"))["pid"]
            for name in ("drafter", "verifier", "gateway")
        ]
        handles = [os.pidfd_open(pid) for pid in pids]
        running.process.kill()
        for handle in handles:
            ended, _, _ = await asyncio.to_thread(select.select, [handle], [], [])
            assert ended
            os.close(handle)


@pytest.mark.parametrize(
    ("device", "num_verifiers", "variables", "parts"),
    [
        (None, 1, {}, [{}]),
        ("cuda", 1, {}, [{}]),
        ("cuda", 2, {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (
            "cuda",
            2,
            {"CUDA_VISIBLE_DEVICES": "4,6"},
            [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "6"}],
        ),
        ("cuda", 2, {"CUDA_VISIBLE_DEVICES": "1"}, [{"CUDA_VISIBLE_DEVICES": "1"}] * 2),
        (None, 3, {}, [{"TANDEM_VERIFIER_THREADS": "2"}] * 3),
        ("cpu", 9, {}, [{"TANDEM_VERIFIER_THREADS": "1"}] * 9),
        ("cpu", 2, {"TANDEM_VERIFIER_THREADS": "4"}, [{}, {}]),
    ],
)
def test_several_verifiers_have_a_gpu_each_or_a_part_of_the_cores(
    device: Device | None,
    num_verifiers: int,
    variables: dict[str, str],
    parts: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology_module, "_num_cores", lambda: 8)
    for name in ("CUDA_VISIBLE_DEVICES", "TANDEM_VERIFIER_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    topology = Topology(model=up.BUNDLED_MODEL, device=device, num_verifiers=num_verifiers)
    addresses = [f"127.0.0.1:{index}" for index in range(num_verifiers)]
    specs = topology.verifiers(addresses, addresses, [])
    assert [spec.environment for spec in specs] == parts


def test_the_ports_of_services_are_none_that_the_system_gives_to_others() -> None:
    ports = Ports.choose(Topology(model=up.BUNDLED_MODEL, num_drafters=2, num_verifiers=3))
    services = [*ports.drafters, *ports.drafter_metrics, *ports.verifiers, *ports.verifier_metrics]
    addresses = [*services, ports.gateway_metrics]
    assert len(set(addresses)) == 11
    assert all(1024 <= int(each.removeprefix("127.0.0.1:")) < 32_768 for each in addresses)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([], "no config.json, no tokenizer.json, no *.safetensors"),
        (["config.json", "model-00001-of-00001.safetensors"], "no tokenizer.json"),
        (["config.json", "tokenizer.json"], "no *.safetensors"),
    ],
)
def test_what_a_models_folder_lacks_is_named_before_anything_starts(
    present: list[str], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in present:
        (tmp_path / name).touch()
    assert main(["up", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == f"tandem up: --model: {tmp_path} is not a whole model: it has {missing}\n"


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_that_another_process_has_is_named_before_anything_starts(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "--http-port" if flag == "--port" else "--port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert main(["up", other, "0", flag, str(number)]) == 1
    assert capsys.readouterr().err == (
        f"tandem up: {flag}: 127.0.0.1:{number}: Address already in use; 0 picks a free port\n"
    )


def option(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


async def accepts(address: str) -> bool:
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    return True


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
