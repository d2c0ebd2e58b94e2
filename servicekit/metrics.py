"""The Prometheus exporter.

Owns what a scrape of a registry is answered, and the HTTP endpoint that answers it. Knows no
metric: whoever measures registers in the registry that was given to both.

Scrapes run in threads of their own, beside whoever measures. So what is read at a scrape (a gauge's
function, a collector) must be one step for the interpreter: a number, a length, a copy.
"""

import http
import http.server
import socket
import threading
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from servicekit.address import Address, parse_address
from servicekit.logs import Logger, get_logger

PATH = "/metrics"

# How long a connection may keep its thread without saying anything, and how soon a stop is seen.
_IDLE_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.05

_END_OF_OPEN_METRICS = b"# EOF\n"


class Exposition:
    """What a registry's metrics are in text. For any thread.

    A metric that cannot be read, or is no number, is left out and logged the first time; all others
    are answered.
    """

    def __init__(self, registry: CollectorRegistry, logger: Logger | None = None) -> None:
        self._registry = registry
        self._logger = logger or get_logger(__name__)
        self._lock = threading.Lock()
        self._failed: set[Collector] = set()  # of the registry's; each was logged

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics now.

        Args:
            accept: the scraper's header of that name; it chooses the format.

        Returns:
            The text, and its content type.
        """
        encode, content_type = choose_encoder(accept)
        with self._registry._lock:
            collectors = list(self._registry._collector_to_names)
        parts = []
        for collector in collectors:
            try:
                part = encode(_Families(list(collector.collect())))
            except Exception:
                self._log_once(collector)
            else:
                parts.append(part.removesuffix(_END_OF_OPEN_METRICS))
        if content_type.startswith("application/openmetrics-text"):
            parts.append(_END_OF_OPEN_METRICS)
        return b"".join(parts), content_type

    def _log_once(self, collector: Collector) -> None:
        with self._lock:
            if collector in self._failed:
                return
            self._failed.add(collector)
        names = self._registry._collector_to_names.get(collector, ())
        self._logger.exception("metric_failed", metric=min(names, default=""))


class _Families:
    """All that an encoder asks of a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class MetricsServer:
    """Serves one registry at `http://ADDRESS/metrics` from a daemon thread of its own."""

    def __init__(
        self, registry: CollectorRegistry, listen: str, logger: Logger | None = None
    ) -> None:
        address = parse_address(listen)
        self._server = _HTTPServer(Exposition(registry, logger), address)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_INTERVAL_S,),
            name="metrics",
            daemon=True,
        )
        self._thread.start()
        self.address = str(Address(host=address.host, port=self._server.server_port))

    def stop(self) -> None:
        """Closes the endpoint; returns within a fraction of a second. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(
    registry: CollectorRegistry, listen: str, logger: Logger | None = None
) -> MetricsServer:
    """Starts to serve the registry; the result's `address` has the real port.

    Raises:
        ValueError: `listen` is not HOST:PORT.
        OSError: the address cannot be bound.
    """
    return MetricsServer(registry, listen, logger)


class _HTTPServer(http.server.ThreadingHTTPServer):
    def __init__(self, exposition: Exposition, address: Address) -> None:
        self.exposition = exposition
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        """Answers a scrape."""
        assert isinstance(self.server, _HTTPServer)
        if self.path.partition("?")[0] != PATH:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return
        body, content_type = self.server.exposition.render(self.headers.get("Accept", ""))
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged: they come every few seconds, for ever."""
