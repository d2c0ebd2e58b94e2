"""Services that a benchmark or a test has started end with it, however it ends."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest

from benchmarks.services import REPOSITORY, Service, running_process

SERVICE = "drafter"
STARTS_AND_WAITS = f"""
import signal
from benchmarks.services import running_process
with running_process({SERVICE!r}) as service:
    print(service.pid, flush=True)
    signal.pause()
"""
TIMEOUT_S = 30.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not end orphans")


@on_linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_service_dies_with_the_process_that_started_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_WAITS], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        service = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(number)
    try:
        assert select.select([service], [], [], TIMEOUT_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(service, signal.SIGKILL)
        os.close(service)


@on_linux
def test_a_service_outlives_the_thread_that_wanted_it() -> None:
    with contextlib.ExitStack() as exits:
        services: list[Service] = []
        thread = threading.Thread(
            target=lambda: services.append(exits.enter_context(running_process(SERVICE)))
        )
        thread.start()
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():
            pass  # the kernel has not ended it yet
        with grpc.insecure_channel(services[0].address) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
