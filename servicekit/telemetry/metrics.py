"""The Prometheus endpoint.

Owns the text that answers a scrape of a registry, and the HTTP port that serves it. Knows no
metric: whoever measures registers in the registry that was given to both.

Scrapes run in threads of their own, beside whoever measures. So whatever a scrape reads (a gauge's
function, a collector) must be one step for the interpreter: a number, a length, a copy.

The port runs prometheus_client's handler on the standard library's server: prometheus_client's own
server lets silent connections hold their threads forever.
"""

import http
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric, MetricsHandler
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from servicekit.address import Address, parse_address
from servicekit.listening_socket import listening_socket
from servicekit.logs import Logger, get_logger

PATH = "/metrics"

_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
_ODD_VERSION = re.compile(r"application/openmetrics-text; version=(?!(0\.0\.1|1\.0\.0);)")

# How long a silent connection may keep its thread, and how soon a stop is noticed.
_IDLE_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.05
# How long no connection is accepted after one that could not be.
_PAUSE_S = 0.1


def choose_format(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """The format that a scraper asks for: what writes it, and its content type.

    Args:
        accept: its header of that name; one that cannot be read asks for the usual format.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except Exception:  # prometheus_client compares what it could not parse
        return choose_encoder("")
    if _ODD_VERSION.match(content_type):
        # It names any later version as the scraper did.
        return choose_encoder(_OPEN_METRICS)
    return encode, content_type


class Exposition(Collector):
    """The readable metrics of a registry. For any thread.

    A metric that cannot be read, or is not a number, is left out and logged the first time; in
    `CollectorRegistry.collect` it would fail the whole scrape.
    """

    def __init__(self, registry: CollectorRegistry, logger: Logger | None = None) -> None:
        self._registry = registry
        self._logger = logger or get_logger(__name__)
        self._lock = threading.Lock()
        self._failed: set[Collector] = set()  # of the registry's; each was logged

    def collect(self) -> Iterator[Metric]:
        with self._registry._lock:
            collectors = list(self._registry._collector_to_names)
        for collector in collectors:
            try:
                families = list(collector.collect())
                _check(families)
            except Exception:
                self._log_once(collector)
            else:
                yield from families

    def _log_once(self, collector: Collector) -> None:
        with self._lock:
            if collector in self._failed:
                return
            self._failed.add(collector)
        names = self._registry._collector_to_names.get(collector, ())
        self._logger.exception("metric_failed", metric=min(names, default=""))


class _Server(ThreadingHTTPServer):
    """The base class prints tracebacks, of clients that go away too."""

    def __init__(
        self, listener: socket.socket, handler: type[MetricsHandler], logger: Logger
    ) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        # In place of the base class's own, which is of one family of addresses.
        self.socket.close()
        self.socket = listener
        self.logger = logger

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; the base class tries again at once after an error."""
        try:
            return super().get_request()
        except OSError:
            # Without descriptors, the connection goes on waiting: the thread would take a core.
            time.sleep(_PAUSE_S)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            self.logger.warning("scrape_failed", error=repr(error))


class MetricsServer:
    """Serves one registry at `http://ADDRESS/metrics` from a daemon thread of its own.

    Its `address` has the real port.

    Raises:
        ValueError: `listen` is not HOST:PORT.
        OSError: the address cannot be bound.
    """

    def __init__(
        self, registry: CollectorRegistry, listen: str, logger: Logger | None = None
    ) -> None:
        address = parse_address(listen)
        handler = _Handler.factory(Exposition(registry, logger))
        listener = listening_socket(address, backlog=_Server.request_queue_size)
        port = listener.getsockname()[1]
        self._server = _Server(listener, handler, logger or get_logger(__name__))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_INTERVAL_S,),
            name="metrics",
            daemon=True,
        )
        self._thread.start()
        self.address = str(Address(host=address.host, port=port))

    def stop(self) -> None:
        """Closes the endpoint; returns within a fraction of a second. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(MetricsHandler):
    timeout = _IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        """Answers a scrape of `PATH`."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return
        self.path = PATH  # prometheus_client would read the query
        _, content_type = choose_format(self.headers.get("accept", ""))
        del self.headers["accept"]
        self.headers["accept"] = content_type
        super().do_GET()


def _check(families: Iterable[Metric]) -> None:
    """Raises where prometheus_client could not write a value or a label."""
    for family in families:
        for sample in family.samples:
            float(sample.value)
            "".join(sample.labels.values())
