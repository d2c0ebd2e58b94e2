"""HTTP: metrics for Prometheus, health for load balancers."""

import asyncio
import json
import socket

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.http import HttpListener
from gateway.config import GatewayConfig
from gateway.errors import UnreadError
from gateway.server import GatewayServer
from servicekit.config import ConfigError, ServerOptions
from servicekit.logs import Logger
from servicekit.serving.client_waits import ClientWaits
from tests.gateway.running_gateway import RunningGateway, StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in


async def get(
    running: RunningGateway, path: str, more_head: str = ""
) -> tuple[int, dict[str, str], str]:
    """A request over a plain socket: status, headers, body."""
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more_head}\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(60):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    status_line, *lines = head.split("\r\n")
    headers = {line.split(": ")[0].lower(): line.split(": ", 1)[1] for line in lines}
    return int(status_line.split()[1]), headers, body


async def test_metrics_are_all_there_in_prometheus_form(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 6, 7, 0])
    running = await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")
    await running.generate(1, 2)
    status, headers, body = await get(running, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["tandem_generation_tokens_total", verifier.model_id] == 4
    assert samples["tandem_prompt_tokens_total", verifier.model_id] == 2
    assert samples["tandem_request_success_total", "stop", verifier.model_id] == 1
    assert samples["tandem_request_success_total", "length", verifier.model_id] == 0


async def test_health_says_whether_requests_would_be_run(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")
    status, headers, body = await get(running, "/health")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {"status": "serving"}
    await verifier.stop()
    await until(lambda: not running.gateway.frontend.is_serving)
    status, _, body = await get(running, "/health")
    assert (status, json.loads(body)) == (503, {"status": "not_serving"})


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
async def test_a_request_that_offers_another_protocol_is_answered_and_logs_nothing(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    caplog: pytest.LogCaptureFixture,
    offered: str,
) -> None:
    running = await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")
    upgrade = f"Upgrade: {offered}\r\nConnection: Upgrade\r\n"
    assert (await get(running, "/health", upgrade))[0] == 200
    assert caplog.records == []


def make_listener(listen: str = "127.0.0.1:0") -> HttpListener:
    """One that does not run, so that nothing is accepted."""
    return HttpListener(
        listen=listen,
        options=ServerOptions(listen=listen, allow_plaintext=True),
        certificate=None,
        registry=CollectorRegistry(),
        routes=(),
        allowed_origins=(),
        refuse_metrics=None,
        is_ready=lambda: True,
        client_waits=ClientWaits(unread_timeout_s=1.0, make_unread_error=lambda: UnreadError("")),
    )


async def test_a_client_that_vanishes_while_its_request_waits_is_noticed_by_the_kernel() -> None:
    """Nothing is written to it that it would not acknowledge."""
    listener = make_listener()
    host, port = listener.address.split(":")
    async with asyncio.timeout(20):
        _, writer = await asyncio.open_connection(host, port)
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener._socket)
    with accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            idle_s, interval_s, count = (
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle_s + interval_s * count <= 60
    writer.close()
    listener.close()


async def test_an_address_in_use_is_named(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    registry: CollectorRegistry,
    logger: Logger,
) -> None:
    running = await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")
    config = GatewayConfig(
        server=ServerOptions(listen="127.0.0.1:0"),
        http_listen=running.gateway.http_address,
        verifiers=[verifier.address],
    )
    second = GatewayServer(config, registry=registry, logger=logger)
    with pytest.raises(ConfigError, match="in use") as caught:
        await second.start()
    assert caught.value.key == "--http-listen"
