"""HTTP: the OpenAI API, `/metrics`, `/health`, `/ready` and `/openapi.json`.

Owns the listening socket, the routes, and what holds for every request: its id, and how long its
answer may stay unread. An ASGI application (Starlette on uvicorn) on the event loop of gRPC:
further APIs are more routes around the same `Frontend`.
"""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.acceptor import Acceptor
from gateway.api.connection import Connection
from gateway.api.connection_limits import ConnectionLimits
from gateway.api.http_connection import bounded
from gateway.api.openai.errors import http_error
from gateway.api.scrapes import Scrapes
from gateway.errors import UnreadError
from servicekit.address import Address, parse_address
from servicekit.channels.tls import ServerCertificate, check_plaintext, server_context
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ServerOptions
from servicekit.interceptors.request_id import valid_request_id
from servicekit.listening_socket import cannot_listen, listening_socket
from servicekit.serving.client_waits import ClientWaits
from servicekit.telemetry.metrics import Exposition
from servicekit.telemetry.trace_context import TRACE_PARENT_KEY, bind_trace_parent

# For requests that are still being answered when the process stops.
_SHUTDOWN_TIMEOUT_S = 1

# Longer than load balancers keep a connection for their next request (60 s, most of them): the
# side that closes first loses no request.
_IDLE_TIMEOUT_S = 75

# A client that is gone without closing its connection (a cut cable) may have a request that waits
# for hours: nothing is written to it by then. It is noticed within a minute: after so many seconds
# without a byte the kernel asks for a sign of it, every so many seconds, so often.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

# The most bytes of an answer that a connection is given at a time.
_PART_BYTES = 64 * 1024

# Connections that may wait to be accepted. The kernel drops those beyond: their clients try again
# after a second.
_BACKLOG = 2048

# The line and the headers of a request.
_MAX_HEAD_BYTES = 32 * 1024

_TRACE_PARENT = TRACE_PARENT_KEY.encode()

#: The answer to a client that may not see the metrics; None: it may.
RefuseMetrics = Callable[[Scope], Response | None]


class HttpListener:
    """Serves HTTP on one address; `run` is its only task."""

    def __init__(
        self,
        *,
        listen: str,
        options: ServerOptions,
        certificate: WatchedFiles[ServerCertificate] | None,
        registry: CollectorRegistry,
        routes: Sequence[BaseRoute],
        allowed_origins: Sequence[str],
        refuse_metrics: RefuseMetrics | None,
        is_ready: Callable[[], bool],
        client_waits: ClientWaits,
    ) -> None:
        """Binds and listens; requests are answered once `run` has begun.

        Args:
            listen: the address.
            options: TLS, mTLS or plaintext, timeouts and limits, by the rules of the gRPC port.
            certificate: the gRPC port's; None: it speaks plaintext.
            registry: what `/metrics` shows.
            routes: those of the APIs.
            allowed_origins: whose pages browsers let read the answers; `*`: all.
            refuse_metrics: the answer to one who may not see the metrics; None: everybody may.
            is_ready: whether requests that come now would be run.
            client_waits: ends the requests of clients that do not read.

        Raises:
            ConfigError: the address cannot be bound, or plaintext is not allowed on it.
        """
        if certificate is None:
            check_plaintext(options, "--http-listen", listen)
        address = parse_address(listen)
        self._socket = _bind(address)
        self.address = str(Address(host=address.host, port=self._socket.getsockname()[1]))
        limits = ConnectionLimits(
            max_connections=options.max_concurrent_calls, head_timeout_s=options.request_timeout_s
        )
        application = _for_origins(
            allowed_origins, make_application(registry, routes, is_ready, refuse_metrics)
        )
        config = uvicorn.Config(
            _Guard(application, is_ready, client_waits),
            http=bounded(limits),
            backlog=_BACKLOG,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_keep_alive=_IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
        )
        context = None if certificate is None else server_context(certificate)
        self._server = _Server(config, limits, context)

    async def run(self) -> None:
        """Serves until cancelled; then requests in flight get `_SHUTDOWN_TIMEOUT_S` to end."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._server.started:
                await self._server.shutdown(sockets=[self._socket])

    async def drain(self) -> None:
        """Returns when the clients have taken the answers to the requests that are running now."""
        if tasks := self._server.server_state.tasks:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """Frees the address, even if `run` never began."""
        self._socket.close()


def make_application(
    registry: CollectorRegistry,
    routes: Sequence[BaseRoute],
    is_ready: Callable[[], bool],
    refuse_metrics: RefuseMetrics | None = None,
) -> Starlette:
    """The routes: those of the APIs, and the gateway's own."""
    scrapes = Scrapes(Exposition(registry))

    async def metrics(request: Request) -> Response:
        refusal = None if refuse_metrics is None else refuse_metrics(request.scope)
        if refusal is not None:
            return refusal
        body, content_type = await scrapes.answer(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        if is_ready():
            return JSONResponse({"status": "serving"})
        return JSONResponse({"status": "not_serving"}, status_code=503)

    application = Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/ready", health),
            *routes,
        ],
        exception_handlers={HTTPException: http_error},
    )
    # Such a redirection leads to http:// where a proxy ends TLS, and clients repeat their prompts
    # and tokens in plaintext.
    application.router.redirect_slashes = False
    return application


def _for_origins(origins: Sequence[str], application: ASGIApp) -> ASGIApp:
    """The application for browsers, too, that show pages of these origins.

    Around all of it: a browser asks beforehand without a key, and reads errors only with the
    headers.
    """
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        # OpenAI's client sends a dozen of its own.
        allow_headers=("*",),
        # Public pages may call a gateway in a private network, or on the browser's own machine.
        allow_private_network=True,
        expose_headers=("x-request-id", "retry-after", "retry-after-ms"),
    )


class _Guard:
    """What holds for every request, around the application."""

    def __init__(
        self, application: ASGIApp, is_ready: Callable[[], bool], client_waits: ClientWaits
    ) -> None:
        self._application = application
        self._is_ready = is_ready
        self._client_waits = client_waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; an ASGI application."""
        connection: Connection = scope["state"]["connection"]
        if scope["method"] == "POST" and connection.is_gone():
            await connection.cut_off(receive)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = valid_request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        structlog.contextvars.bind_contextvars(request_id=request_id)
        bind_trace_parent(headers.get(_TRACE_PARENT, b"").decode("latin-1"))
        try:
            async with self._client_waits.open() as call:

                async def watched_send(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        # One that is not ready wants the next connection opened elsewhere.
                        is_last = not self._is_ready() or connection.is_last()
                        self._add_headers(message, request_id, is_last=is_last)
                    for part in _parts(message):
                        call.begin_write()
                        await send(part)
                        call.go_on()

                await self._application(scope, receive, watched_send)
        except UnreadError:
            # No answer would reach the client.
            await connection.cut_off(receive)

    def _add_headers(self, message: Message, request_id: str, *, is_last: bool) -> None:
        # Not in place: applications may send the same headers with every answer.
        headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
        if is_last and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        message["headers"] = headers


def _parts(message: Message) -> Iterator[Message]:
    """The message as it is sent: each part waits until the client has taken the one before.

    The last part of an answer is empty. So a request is answered, and its connection waits for the
    next one, once nothing is left of the answer here.
    """
    if message["type"] != "http.response.body":
        yield message
        return
    body = message.get("body", b"")
    for start in range(0, len(body), _PART_BYTES):
        part = body[start : start + _PART_BYTES]
        yield {"type": message["type"], "body": part, "more_body": True}
    if not message.get("more_body", False):
        yield {"type": message["type"], "body": b"", "more_body": False}


class _Server(uvicorn.Server):
    """A server with an acceptor of its own, which does not handle the process's signals."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._context = context

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        make_connection = functools.partial(
            bounded(self._limits),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [
            # What uvicorn asks of a server is to close.
            Acceptor(
                each, context=self._context, limits=self._limits, make_connection=make_connection
            )  # type: ignore[misc]
            for each in sockets or ()
        ]
        self.started = True


def _bind(address: Address) -> socket.socket:
    try:
        listener = listening_socket(address, backlog=_BACKLOG)
    except (OSError, TypeError, UnicodeError) as error:  # a name may not be encodable
        raise cannot_listen("--http-listen", str(address), error) from None
    # Its connections inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # systems differ
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener
