"""Liveness: false only when the engine makes no progress, whatever the load."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.serving.health import LIVENESS_NAME
from tandem.values import DraftWait
from tests.verifier.running_engine import RunningEngine, StartEngine, start_engine_with
from tests.verifier.running_verifier import PATIENCE_S, StartVerifier
from verifier.service.watchdog import CHECKS_PER_TIMEOUT, Watchdog

# A healthy engine on a busy machine mostly answers well within it; if not, the verdicts awaited
# below come a little later.
STALL_TIMEOUT_S = 0.2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Verdicts:
    """The watchdog's last verdict; `wait` waits for another."""

    def __init__(self) -> None:
        self.is_alive = True
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def record(self, is_alive: bool) -> None:
        self.is_alive = is_alive
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, is_alive: bool) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.is_alive is is_alive)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def watched(
    running: RunningEngine,
) -> AsyncIterator[tuple[Verdicts, "asyncio.Task[None]"]]:
    verdicts = Verdicts()
    stopped = asyncio.wrap_future(running.engine.stopped)
    watchdog = Watchdog(running.engine, stall_timeout_s=STALL_TIMEOUT_S, on_change=verdicts.record)
    watching = asyncio.create_task(watchdog.run(stopped))
    try:
        yield verdicts, watching
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_step_that_does_not_end_is_reported_and_so_is_its_end(
    start_engine: StartEngine,
) -> None:
    may_step = threading.Event()

    def hang(token_ids: list[int]) -> int:
        may_step.wait(PATIENCE_S)
        return len(token_ids) % 3

    running = start_engine(rule=hang)
    session = running.attach()
    async with watched(running) as (verdicts, _):
        sequence_id = session.open([1, 2, 3], max_new_tokens=2)
        await verdicts.wait(False)
        may_step.set()
        await verdicts.wait(True)
    await asyncio.to_thread(session.wait_end, sequence_id)


async def test_sequences_that_wait_for_their_drafts_are_no_stall(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_engine()
    session = running.attach()
    num_checks = 0
    needs_step = Watchdog._needs_step

    async def counted(self: Watchdog, stopped: "asyncio.Future[None]") -> bool | None:
        nonlocal num_checks
        num_checks += 1
        return await needs_step(self, stopped)

    monkeypatch.setattr(Watchdog, "_needs_step", counted)
    sequence_id = session.open([1, 2, 3], max_new_tokens=3, draft_wait=DraftWait.ALWAYS)
    await asyncio.to_thread(session.wait_decided, sequence_id, 1)
    async with watched(running) as (verdicts, _), asyncio.timeout(PATIENCE_S):
        while num_checks < 4 * CHECKS_PER_TIMEOUT:
            await asyncio.sleep(STALL_TIMEOUT_S)
            assert verdicts.is_alive
    session.close(sequence_id)
    await asyncio.to_thread(session.wait_end, sequence_id)


async def test_the_end_of_the_engine_thread_is_reported() -> None:
    running = start_engine_with()
    async with watched(running) as (verdicts, watching):
        running.engine.stop()
        await verdicts.wait(False)
        async with asyncio.timeout(PATIENCE_S):
            await watching


async def test_probes_see_a_stall_under_the_liveness_name_only(
    start_verifier: StartVerifier,
) -> None:
    running = await start_verifier(stall_timeout_s=STALL_TIMEOUT_S)
    running.verifier.server.set_serving()
    health = health_pb2_grpc.HealthStub(running.channel)
    stopped = asyncio.wrap_future(running.engine.stopped)
    watching = asyncio.create_task(running.verifier.watch(stopped))
    watch = health.Watch(health_pb2.HealthCheckRequest(service=LIVENESS_NAME))

    async def hear(status: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await watch.read()).status != status:
                pass

    await hear(SERVING)
    goes_on = threading.Event()
    held = running.engine.call(lambda: goes_on.wait(PATIENCE_S))
    await hear(NOT_SERVING)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
    goes_on.set()
    await hear(SERVING)
    assert held.result()
    watch.cancel()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
