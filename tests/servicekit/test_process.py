"""A service as a process: what it prints, how it takes signals, what its exit code is.

On uvloop, and on asyncio's own loop where that may make a difference.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import servicekit
from servicekit.channels.channel import open_channel
from servicekit.config import ChannelOptions
from tandem.free_ports import free_port
from tests.volume import cases

SCRIPT = '''
"""A server whose method answers after a file appears."""

import asyncio
import os
import sys
import time

if os.environ.get("WITHOUT_UVLOOP"):
    sys.modules["uvloop"] = None

import grpc
import pydantic
from prometheus_client import CollectorRegistry

from servicekit.config import ServerOptions, load_config
from servicekit.logs import configure_logs, get_logger
from servicekit.serving.process import end, run, serve_until_signalled
from servicekit.serving.server import Server


class ScriptOptions(pydantic.BaseModel, frozen=True, extra="forbid"):
    server: ServerOptions = ServerOptions()
    mode: str = "serve"
    linger_s: float = 0.0


async def main(options):
    get_logger("script").info("loop", name=type(asyncio.get_running_loop()).__module__)
    finish = asyncio.Event()

    async def echo(request, context):
        if request == b"wait":
            await finish.wait()
        return request

    async def drain():
        get_logger("script").info("draining")
        await asyncio.sleep(options.linger_s)
        finish.set()

    server = Server(
        options.server,
        service="script",
        service_names=["test.v1.EchoService"],
        error_table={},
        registry=CollectorRegistry(),
        logger=get_logger("script"),
    )
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.grpc.add_registered_method_handlers("test.v1.EchoService", {"Echo": handler})
    async with server:
        if options.mode == "blocked":
            print("starting", flush=True)
            time.sleep(60)
        if options.mode == "threaded":  # which asyncio waits for when it closes, by default
            print("starting", flush=True)
            await asyncio.to_thread(time.sleep, 600)
        await serve_until_signalled(server, drain=drain)


if __name__ == "__main__":
    options = load_config(ScriptOptions, service="script")
    configure_logs(options.server.log_level, "script")
    end(run(lambda: main(options)))
'''


class Script:
    """The running script."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def read_address(self) -> str:
        line = self.read_line()
        assert line.startswith("ready grpc="), line
        return line.removeprefix("ready grpc=").strip()

    def end(self) -> tuple[int, str, list[dict[str, Any]]]:
        """Waits for it; its exit code, the rest of its output, and its log lines."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, [json.loads(line) for line in err.splitlines()]


@pytest.fixture
def loop_module() -> str:
    return "uvloop"


# For tests that depend on the event loop.
on_both_loops = pytest.mark.parametrize("loop_module", ["uvloop", "asyncio"])


@pytest.fixture
def start(tmp_path: Path, loop_module: str) -> Iterator[Any]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def start(*argv: str, stdout: Any = subprocess.PIPE, **environ: str) -> Script:
            root = Path(servicekit.__file__).parents[1]
            environ = {**os.environ, "PYTHONPATH": str(root), **environ}
            environ.pop("PYTHONUNBUFFERED", None)  # it would flush the ready line in any case
            if loop_module == "asyncio":
                environ["WITHOUT_UVLOOP"] = "1"
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), *argv],
                    env=environ,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return Script(process)

        yield start


def events(log: list[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in log]


@on_both_loops
async def test_sigterm_drains_finishes_calls_in_flight_and_exits_with_0(
    start: Any, loop_module: str
) -> None:
    script = start("--linger-s", "0.05", TANDEM_SCRIPT_LISTEN="127.0.0.1:0")
    address = script.read_address()
    async with open_channel(address, ChannelOptions()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        echo: Any = channel.unary_unary("/test.v1.EchoService/Echo")
        assert await echo(b"quick") == b"quick"
        waiting = echo(b"wait")
        # Earlier messages on the same connection have arrived before this answer.
        assert await echo(b"quick") == b"quick"
        script.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await waiting == b"wait"
    code, out, log = script.end()
    assert code == 0
    assert out == ""
    assert events(log) == ["loop", "draining"]
    assert log[0]["name"].partition(".")[0] == loop_module
    assert {line["service"] for line in log} == {"script"}


@pytest.fixture
def full_disk() -> Iterator[Any]:
    with Path("/dev/full").open("w") as full:
        yield full


async def test_it_serves_although_its_ready_line_cannot_be_written(
    start: Any, full_disk: Any
) -> None:
    address = f"127.0.0.1:{free_port()}"
    script = start(stdout=full_disk, TANDEM_SCRIPT_LISTEN=address)
    async with open_channel(address, ChannelOptions()) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest()
        async with asyncio.timeout(60):
            while (
                await check(request, wait_for_ready=True)
            ).status != health_pb2.HealthCheckResponse.SERVING:
                pass
    script.process.send_signal(signal.SIGTERM)
    code, _, log = script.end()
    assert code == 0
    assert "process_failed" not in events(log)


def test_it_may_open_as_many_descriptors_as_the_system_lets_it(start: Any) -> None:
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (given[1] // 2, given[1]))
    try:
        script = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, given)
    script.read_address()
    allowed = resource.prlimit(script.process.pid, resource.RLIMIT_NOFILE)
    script.process.send_signal(signal.SIGTERM)
    assert script.end()[0] == 0
    assert allowed == (given[1], given[1])


@on_both_loops
def test_a_signal_before_it_serves_ends_it_at_once(start: Any) -> None:
    script = start("--mode", "threaded")
    assert script.read_line() == "starting\n"
    script.process.send_signal(signal.SIGTERM)
    code, _, log = script.end()
    assert code == 128 + signal.SIGTERM
    assert events(log) == ["loop"]


@on_both_loops
def test_a_second_sigterm_ends_even_a_process_that_is_stuck(start: Any) -> None:
    script = start("--mode", "blocked")
    assert script.read_line() == "starting\n"
    for _ in range(400):  # signals that are pending at the same time are one
        script.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.process.wait(0.05)
            break
    assert script.process.returncode == 128 + signal.SIGTERM


ENDS = """
import atexit, os
from servicekit.serving.process import end

class Crashes:
    def __del__(self):
        os.abort()

crashes = Crashes()  # until the interpreter ends
atexit.register(print, "at exit")
print("buffered", end=" ")
end(3)
"""


def test_what_crashes_while_the_interpreter_ends_does_not_change_the_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "buffered at exit\n", "")


# Each is replaced, and others are left.
@pytest.mark.parametrize(
    "closed", cases(["2>&-", "<&- >&- 2>&-"], ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
)
def test_a_service_runs_and_ends_well_without_its_standard_streams(closed: str) -> None:
    """Else its first socket would get the number of one."""
    port = free_port()
    flags = f"--listen 127.0.0.1:{port} --metrics-listen 127.0.0.1:0"
    command = f"exec {sys.executable} -m drafter {flags} {closed}"
    process = subprocess.Popen(["sh", "-c", command], cwd=Path(servicekit.__file__).parents[1])
    try:
        end_s = time.monotonic() + 60
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            status = None
            while status != health_pb2.HealthCheckResponse.SERVING:
                assert process.poll() is None
                assert time.monotonic() < end_s
                with contextlib.suppress(grpc.RpcError):
                    request = health_pb2.HealthCheckRequest()
                    status = check(request, wait_for_ready=True, timeout=5).status
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
