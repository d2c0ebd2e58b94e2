"""The Prometheus exporter."""

import http.client
import resource
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from servicekit.telemetry.metrics import MetricsServer, _Handler


def fetch(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(server.address, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type") or "", response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("eggs", "Eggs.", ["colour"], registry=registry).labels("blue").inc(3)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer(registry, "127.0.0.1:0")
    yield server
    server.stop()


def test_a_scrape_gets_what_is_in_the_registry_now(
    registry: CollectorRegistry, server: MetricsServer
) -> None:
    status, content_type, body = fetch(server)
    assert status == 200
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    (sample,) = [s for s in families["eggs"].samples if s.name == "eggs_total"]
    assert (sample.labels, sample.value) == ({"colour": "blue"}, 3)
    Counter("later", "Later.", registry=registry)
    # Everything, whatever the query says.
    assert "later_total 0.0" in fetch(server, "/metrics?name[]=eggs_total")[2]


def test_a_header_that_cannot_be_read_gets_the_usual_format(server: MetricsServer) -> None:
    status, content_type, body = fetch(server, Accept="text/plain;version=x")
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    assert "eggs_total" in body


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_a_scraper_that_asks_for_open_metrics_gets_it(server: MetricsServer, version: str) -> None:
    _, content_type, body = fetch(server, Accept=f"application/openmetrics-text;version={version}")
    # Not a later version, in whose form it would not be.
    assert content_type.startswith("application/openmetrics-text; version=1.0.0;")
    assert body.endswith("# EOF\n")


def test_a_silent_connection_ends(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Handler, "timeout", _Handler.timeout / 100)
    server = MetricsServer(registry, "127.0.0.1:0")
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        assert silent.recv(1) == b""
    server.stop()


def test_a_metric_that_cannot_be_read_is_left_out_alone_and_logged_once(
    registry: CollectorRegistry,
) -> None:
    capture = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(
        None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger("info")
    )

    def fail() -> float:
        raise RuntimeError("dictionary changed size during iteration")

    Gauge("broken", "Broken.", registry=registry).set_function(fail)
    Info("wrong", "Its values must be text.", registry=registry)._value = {"of": 1}
    Counter("last", "Last.", registry=registry)
    server = MetricsServer(registry, "127.0.0.1:0", logger)
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        status, _, body = fetch(server, Accept=accept)
        assert status == 200
        read = open_metrics_families if "open" in accept else text_string_to_metric_families
        names = {family.name for family in read(body)}
        assert {"eggs", "last"} <= names <= {"eggs", "eggs_created", "last", "last_created"}
    server.stop()
    logged = [(entry["event"], entry["metric"]) for entry in capture.entries]
    assert logged == [("metric_failed", "broken"), ("metric_failed", "wrong")]


def test_neither_scrapes_nor_a_client_that_goes_in_the_middle_say_anything_on_stderr(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET")
        # Closing then resets the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Answered after it.
    assert fetch(server)[0] == 200
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_a_process_without_descriptors_does_not_spin_and_answers_later(
    server: MetricsServer,
) -> None:
    host, _, port = server.address.rpartition(":")
    thread_id = server._thread.ident
    assert thread_id is not None
    clock = time.pthread_getcpuclockid(thread_id)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection = socket.socket()
    connection.settimeout(20)
    try:
        # No new descriptor is below it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        connection.connect((host, int(port)))
        before_s = time.clock_gettime(clock)
        time.sleep(0.5)
        used_s = time.clock_gettime(clock) - before_s
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert used_s < 0.05
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connection.close()
        server.stop()
