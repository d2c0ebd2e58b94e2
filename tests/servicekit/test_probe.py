"""The probe command, against real servers."""

import asyncio
from typing import Any

import pytest

from servicekit import probe
from servicekit.serving.health import LIVENESS_NAME


async def probe_in_thread(*arguments: str) -> int:
    return await asyncio.to_thread(probe.main, list(arguments))


async def test_it_exits_with_what_health_says(
    start_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await start_server()
    address = running.server.address
    assert await probe_in_thread(address) == 1
    assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
    assert await probe_in_thread(address, "--service", LIVENESS_NAME) == 0
    running.server.set_serving()
    assert await probe_in_thread(address) == 0
    running.server.set_alive(False)
    assert await probe_in_thread(address, "--service", LIVENESS_NAME) == 1
    capsys.readouterr()
    assert await probe_in_thread(address, "--service", "test.v1.Nobody") == 1
    assert capsys.readouterr().err == f"{address}: NOT_FOUND: unknown service\n"


async def test_the_environments_proxy_is_not_asked(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    running = await start_server()
    running.server.set_serving()
    assert await probe_in_thread(running.server.address) == 0


async def test_a_server_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Port 0 is nobody's.
    assert await probe_in_thread("127.0.0.1:0", "--timeout-s", "5") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("127.0.0.1:0: ")
