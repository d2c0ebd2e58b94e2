"""HTTP: `/metrics` and `/health`.

Owns the listening socket and the routes. An ASGI application (Starlette on uvicorn): further APIs
are more routes around the same `Frontend`.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.api.frontend import Frontend
from servicekit.address import Address, parse_address
from servicekit.config import ConfigError, ServerOptions
from servicekit.metrics import Exposition
from servicekit.tls import check_plaintext

# For requests that are still being answered when the process stops.
_SHUTDOWN_TIMEOUT_S = 1


class HttpListener:
    """Serves HTTP on one address; `run` is its only task."""

    def __init__(
        self,
        *,
        listen: str,
        options: ServerOptions,
        frontend: Frontend,
        registry: CollectorRegistry,
    ) -> None:
        """Binds and listens; requests are answered once `run` has begun.

        Args:
            listen: the address.
            options: TLS, mTLS or plaintext, by the rules of the gRPC port; the files have been
                checked.

        Raises:
            ConfigError: the address cannot be bound, or plaintext is not allowed on it.
        """
        if options.tls_cert is None:
            check_plaintext(options, "--http-listen", listen)
        address = parse_address(listen)
        self._socket = _bind(address)
        self.address = str(Address(host=address.host, port=self._socket.getsockname()[1]))
        config = uvicorn.Config(
            make_application(frontend, registry),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            ssl_ca_certs=None if options.tls_client_ca is None else str(options.tls_client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if options.tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serves until cancelled; then requests in flight get `_SHUTDOWN_TIMEOUT_S` to end."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._server.started:
                await self._server.shutdown(sockets=[self._socket])

    def close(self) -> None:
        """Frees the address, even if `run` never began."""
        self._socket.close()


def make_application(frontend: Frontend, registry: CollectorRegistry) -> Starlette:
    """The routes."""
    exposition = Exposition(registry)

    # Not a coroutine: Starlette runs it in a thread, so that a scrape does not delay hints.
    def metrics(request: Request) -> Response:
        body, content_type = exposition.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        if frontend.is_serving:
            return JSONResponse({"status": "serving"})
        return JSONResponse({"status": "not_serving"}, status_code=503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])


class _Server(uvicorn.Server):
    """A server that does not handle the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            "--http-listen", f"cannot listen on {address}: {error.strerror or error}"
        ) from None
    return listener
