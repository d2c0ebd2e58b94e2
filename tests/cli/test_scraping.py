"""Metrics are read as Prometheus would read them, and a hostile server can do no harm."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tandem.cli import scraping
from tandem.cli.scraping import History, ScrapeError, Snapshot, Window, metrics_url, parse, scrape
from tandem.cli.service_figures import figures, kind_of


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:9100", "http://127.0.0.1:9100/metrics"),
        ("[::1]:9100", "http://[::1]:9100/metrics"),
        ("https://gateway", "https://gateway/metrics"),
        ("http://gateway:1/a/b", "http://gateway:1/a/b"),
    ],
)
def test_an_address_is_a_host_with_port_or_a_url(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize("address", ["", "gateway", "gateway:x", "file:///etc/passwd", "ftp://a:1"])
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        metrics_url(address)


def taken(registry: CollectorRegistry, at_s: float) -> Snapshot:
    found = parse(generate_latest(registry).decode())
    return Snapshot(taken_at_s=at_s, samples=found.samples)


def test_a_window_holds_what_happened_in_it() -> None:
    registry = CollectorRegistry()
    steps = Counter("steps", "", ["phase"], registry=registry)
    durations = Histogram("duration_seconds", "", buckets=(1, 2, 4), registry=registry)
    durations.observe(0.5)
    steps.labels("a").inc(100)
    old = taken(registry, 10.0)
    steps.labels("a").inc(6)
    steps.labels("b").inc(2)
    for value in (1.5, 1.5, 3, 3):
        durations.observe(value)
    window = Window(old=old, new=taken(registry, 14.0))
    assert window.rate("steps_total") == 2.0
    assert window.rate("steps_total", phase="b") == 0.5
    assert window.mean("duration_seconds") == 2.25
    # Two of four values lie in (1, 2], two in (2, 4].
    assert window.quantile(0.25, "duration_seconds") == 1.5
    assert window.quantile(0.75, "duration_seconds") == 3.0
    durations.observe(100)
    beyond = Window(old=window.new, new=taken(registry, 15.0))
    assert beyond.quantile(0.5, "duration_seconds") == 4.0


def test_a_bucket_without_a_bound_is_left_out() -> None:
    bounded = 'd_bucket{le="2"} 4\nd_bucket{le="+Inf"} 4\n'
    strange = 'd_bucket 9\nd_bucket{le=""} 9\nd_bucket{le="x"} 9\nd_bucket{le="nan"} 9\n'
    for text, median in ((strange + bounded, 1.0), (strange, None)):
        window = Window(old=Snapshot(taken_at_s=0.0), new=parse(text))
        assert window.quantile(0.5, "d") == median


def test_a_quiet_window_has_no_ratios_and_a_restarted_service_counts_from_0() -> None:
    registry = CollectorRegistry()
    Counter("steps", "", registry=registry).inc(5)
    Histogram("duration_seconds", "", registry=registry)
    same = taken(registry, 1.0)
    quiet = Window(old=same, new=same)
    assert quiet.rate("steps_total") is None
    assert quiet.ratio("steps_total", "steps_total") is None
    assert quiet.quantile(0.5, "duration_seconds") is None
    restarted = CollectorRegistry()
    Counter("steps", "", registry=restarted).inc(2)
    assert Window(old=same, new=taken(restarted, 2.0)).rate("steps_total") == 2.0


def test_figures_say_acceptance_and_leave_out_what_is_unknown() -> None:
    registry = CollectorRegistry()
    Gauge("tandem_num_requests_running", "", registry=registry).set(3)
    names = ("generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens")
    counters = [Counter(f"tandem_{name}", "", registry=registry) for name in names]
    accepted = Counter("tandem_spec_decode_num_accepted_tokens", "", registry=registry)
    old = taken(registry, 0.0)
    for counter, count in zip(counters, (300, 10, 40), strict=True):
        counter.inc(count)
    accepted.inc(30)
    new = taken(registry, 2.0)
    assert kind_of(new) == "gateway"
    found = figures("gateway", Window(old=old, new=new))
    assert (found["running"], found["tokens/s"]) == ("3", "150")
    assert (found["accepted"], found["acc. length"]) == ("75%", "4")
    assert found["TTFT ms"] == "- / -"


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[str]:
    """The URL of a server that answers with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.stand_in
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"HTTP/1.0 500 Oops\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n{not metrics",
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe\xff",
        b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\na 1\n",
        b"HTTP/1.0 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
    ],
)
def test_an_answer_without_metrics_is_an_error(content: bytes) -> None:
    with serving(content) as url, pytest.raises(ScrapeError):
        scrape(url)


@pytest.mark.stand_in
def test_an_answer_that_is_no_http_is_not_shown() -> None:
    # What a server of gRPC sends first.
    with serving(b"\x00\x00\x12\x04\x00\x00\x00\n") as url, pytest.raises(ScrapeError) as caught:
        scrape(url)
    assert str(caught.value) == "no answer in HTTP, as from a port for gRPC or for https://"


@pytest.mark.stand_in
def test_an_answer_without_end_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "_MAX_BYTES", 1000)
    content = b"HTTP/1.0 200 OK\r\n\r\n" + b"a 1\n" * 1000
    with serving(content) as url, pytest.raises(ScrapeError, match="longer than"):
        scrape(url)


@pytest.mark.stand_in
def test_a_head_that_comes_byte_by_byte_is_awaited_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scraping, "_TIMEOUT_S", 0.5)
    has_come, is_over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            server.settimeout(0.0)
            has_come.set()
            with connection, contextlib.suppress(OSError):
                while not is_over.wait(0.1):
                    connection.send(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            for _ in range(2):
                with pytest.raises(ScrapeError, match=r"took longer than 0\.5 s"):
                    scrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
            assert has_come.wait(60)
            with pytest.raises(BlockingIOError):  # no second connection beside the first
                server.accept()
        finally:
            is_over.set()
            thread.join()


def test_a_history_covers_its_window_and_keeps_the_last_two_snapshots() -> None:
    history = History(10.0)
    assert covered_s(history) is None
    for at_s in (0.0, 4.0, 8.0, 12.0, 16.0):
        history.add(Snapshot(taken_at_s=at_s))
    assert covered_s(history) == (4.0, 16.0)
    history.add(Snapshot(taken_at_s=100.0))
    assert covered_s(history) == (16.0, 100.0)
    history.clear()
    assert covered_s(history) is None


def covered_s(history: History) -> tuple[float, float] | None:
    window = history.window
    return (window.old.taken_at_s, window.new.taken_at_s) if window else None


def test_a_history_keeps_few_snapshots_of_a_long_window() -> None:
    history = History(60.0)
    for number in range(6000):
        history.add(Snapshot(taken_at_s=number / 10))
        if number > 620:
            covered = covered_s(history)
            assert covered is not None
            assert covered[1] == number / 10
            assert 58.5 <= covered[1] - covered[0] <= 61.5
    assert len(history._snapshots) <= 64
