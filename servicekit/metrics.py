"""The Prometheus exporter.

Owns the HTTP endpoint from which a registry is scraped. Knows no metric: whoever measures
registers in the registry that was given to both.
"""

import http
import http.server
import socket
import threading

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from servicekit.address import Address, parse_address

PATH = "/metrics"

# How long a connection may keep its thread without saying anything, and how soon a stop is seen.
_IDLE_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.05


class MetricsServer:
    """Serves one registry at `http://ADDRESS/metrics` from a daemon thread of its own."""

    def __init__(self, registry: CollectorRegistry, listen: str) -> None:
        address = parse_address(listen)
        self._server = _HTTPServer(registry, address)
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


def start_metrics_server(registry: CollectorRegistry, listen: str) -> MetricsServer:
    """Starts to serve the registry; the result's `address` has the real port.

    Raises:
        ValueError: `listen` is not HOST:PORT.
        OSError: the address cannot be bound.
    """
    return MetricsServer(registry, listen)


class _HTTPServer(http.server.ThreadingHTTPServer):
    def __init__(self, registry: CollectorRegistry, address: Address) -> None:
        self.registry = registry
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
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged: they come every few seconds, for ever."""
