"""grpc.health.v1: what checks and watches are answered."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.serving.health import LIVENESS_NAME

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

NAMES = ("", "test.v1.EchoService", "grpc.health.v1.Health")


def request(service: str = "") -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def test_a_started_server_is_not_serving_until_set_serving(start_server: Any) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)
    for expected in (NOT_SERVING, SERVING, NOT_SERVING):
        for name in NAMES:
            assert (await stub.Check(request(name))).status == expected
        if expected == NOT_SERVING:
            running.server.set_serving()
        else:
            running.server.set_not_serving()


async def test_an_unknown_service_is_not_found(start_server: Any) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request("test.v1.Nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request("test.v1.Nobody"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    watch.cancel()


async def test_liveness_is_independent_of_serving(start_server: Any) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)

    async def states() -> tuple[int, int]:
        answers = [await stub.Check(request(name)) for name in (LIVENESS_NAME, "")]
        return answers[0].status, answers[1].status

    assert await states() == (SERVING, NOT_SERVING), "it lives while it loads"
    running.server.set_serving()
    running.server.set_alive(False)
    assert await states() == (NOT_SERVING, SERVING)
    running.server.set_alive(True)
    running.server.retire()
    assert await states() == (SERVING, NOT_SERVING), "it lives while it drains"


async def test_every_watcher_sees_every_change_also_after_another_has_left(
    start_server: Any,
) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)
    watches = [stub.Watch(request()) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == NOT_SERVING
    leaver = watches.pop()
    leaver.cancel()
    await running.counted("CANCELLED", name="Watch", service="grpc.health.v1.Health")
    async with asyncio.timeout(20):
        running.server.set_serving()
        for watch in watches:
            assert (await watch.read()).status == SERVING
        running.server.set_not_serving()
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
    for watch in watches:
        watch.cancel()


async def test_watches_end_when_the_server_stops_and_do_not_delay_it(start_server: Any) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)
    running.server.set_serving()
    watch = stub.Watch(request())
    assert (await watch.read()).status == SERVING
    async with asyncio.timeout(20):
        await running.server.stop(60)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE


async def test_once_retired_it_never_serves_again(start_server: Any) -> None:
    running = await start_server()
    stub = health_pb2_grpc.HealthStub(running.channel)
    running.server.set_serving()
    watch = stub.Watch(request())
    assert (await watch.read()).status == SERVING
    running.server.retire()
    running.server.set_serving()
    assert (await stub.Check(request())).status == NOT_SERVING
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
