"""Bounds on HTTP connections: how many there are, and how long each may take to send a request.

uvicorn bounds the size of a request's head and how long a connection may stay idle between two
requests, but lets a client take forever for its first request, or for the head of any. Owns these
timers, and which connection goes when there is no room for a new one; one whose TLS handshake is
not done counts, too. Refuses what is not HTTP, and bodies in tiny chunks, with the reason. Knows no
request.
"""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.api.openai.errors import ApiError
from servicekit.interceptors.request_id import valid_request_id
from servicekit.logs import get_logger

logger = get_logger(__name__)

# After so many chunks of one body, its chunks must have so many bytes on average. Each chunk costs
# some 10 us of the event loop, whatever it holds, and a connection may bring 100,000 at a time.
_MAX_SMALL_CHUNKS = 1_024
_SMALL_CHUNK_BYTES = 1_024

# Of requests that come while an earlier one is answered: beyond it, nothing more is read until that
# answer is done.
_MAX_PIPELINED_BYTES = 32 * 1024

# What h11 quotes of a request in an error. It may be a token of the client's.
_QUOTED = re.compile(r":? (bytearray\()?b['\"].*", re.DOTALL)

# Of a target in absolute form: the scheme and the authority.
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a request may know of its connection: `request.state.connection`.

    Attributes:
        abort: closes it at once and drops what the client has not read.
        certificate_names: of the client's verified certificate: the DNS names and URIs; the common
            name, if it has no alternative name at all. Empty without a certificate.
    """

    abort: Callable[[], None]
    certificate_names: tuple[str, ...]


class Waiting(Protocol):
    """A connection that answers no request."""

    def give_up(self) -> None:
        """Closes it at once. It makes room for another."""


class ConnectionLimits:
    """The bounds of one listener, and its connections that answer no request.

    Attributes:
        waiting: those, oldest first; one whose handshake is done begins anew.
    """

    def __init__(self, *, max_connections: int, head_timeout_s: float) -> None:
        """Begins without connections.

        Args:
            max_connections: the most at a time. One more closes the one that has waited longest
                for a request; if all are answering, itself.
            head_timeout_s: most seconds for a request's head, from its first byte; for the first
                request, from the connection's beginning (with TLS: from the end of the handshake,
                which may take as long again).
        """
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self.waiting: dict[Waiting, None] = {}
        self._open: set[Waiting] = set()

    def open(self, connection: Waiting) -> None:
        """A connection is there, and waits. If there are too many, one goes."""
        self._open.add(connection)
        self.waiting[connection] = None
        if len(self._open) > self.max_connections:
            next(iter(self.waiting)).give_up()

    def close(self, connection: Waiting) -> None:
        """A connection is gone; idempotent."""
        self._open.discard(connection)
        self.waiting.pop(connection, None)


class BrokenRequestError(Exception):
    """A request that breaks the protocol or a bound; the text says how, without quoting it.

    Not h11's: uvicorn would answer that without the reason.
    """


class RequestParser(h11.Connection):
    """Reads the requests of one connection."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        """As in h11, for a server."""
        super().__init__(h11.SERVER, max_incomplete_event_size)
        # Of the request's body so far.
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """As in h11.

        Raises:
            BrokenRequestError: the client breaks the protocol, or its chunks are too small.
        """
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise BrokenRequestError(
                f"the request is not valid HTTP: {_QUOTED.sub('', str(error))}"
            ) from error
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            return _in_origin_form(event)
        if isinstance(event, h11.Data):
            # A chunk may come in several events, and so may a body without any.
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if (
                self._num_chunks > _MAX_SMALL_CHUNKS
                and self._num_bytes < self._num_chunks * _SMALL_CHUNK_BYTES
            ):
                raise BrokenRequestError(
                    f"the body's chunks are too small: beyond {_MAX_SMALL_CHUNKS}, they must hold "
                    f"{_SMALL_CHUNK_BYTES} bytes on average"
                )
        return event


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with a target as most clients write it: of an absolute one, path and query."""
    absolute = _ABSOLUTE.match(request.target)
    if absolute is None:
        return request
    rest = request.target[absolute.end() :]
    return h11.Request(
        method=request.method,
        headers=request.headers,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        http_version=request.http_version,
    )


class BoundedConnection(H11Protocol):
    """One connection of a listener with `limits`, which `bounded` sets.

    Attributes:
        handshake: what counted as the connection until its TLS handshake was done.
    """

    limits: ConnectionLimits
    handshake: Waiting | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = RequestParser(self.conn._max_incomplete_event_size)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A write waits for all before it, not for most of it: what is left unread is noticed.
        transport.set_write_buffer_limits(high=1)
        connection = Connection(
            abort=transport.abort, certificate_names=_certificate_names(transport)
        )
        self.app_state = {**self.app_state, "connection": connection}
        if self.handshake is not None:
            self.limits.close(self.handshake)
        self.limits.open(self)
        if self in self.limits.waiting:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            return
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # The rest of a body that its answer did not wait for.
            self._await_request()
        else:
            self._await_head()

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except BrokenRequestError as error:
            self._refuse(str(error))
        if not self._is_answering:
            return
        self._stop_waiting()
        if (
            self.conn.their_state is h11.DONE
            and len(self.conn.trailing_data[0]) <= _MAX_PIPELINED_BYTES
        ):
            # uvicorn reads nothing more once the next request has begun, so that it would not
            # notice that the client goes away.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self.limits.waiting[self] = None
            if self.conn.trailing_data[0]:
                # The next head has begun.
                self._await_head()

    def give_up(self) -> None:
        """Closes it at once."""
        # The event loop reports it as lost only later. Until then, the next connection of a burst
        # must find another one to close.
        self._stop_waiting()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.limits.close(self)
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: a request may offer a protocol, and is answered without it."""

    def _refuse(self, reason: str) -> None:
        """Answers a request that breaks the protocol, unless an answer has begun, and closes the
        connection.
        """
        given = b""
        if self._is_answering:
            given = dict(self.cycle.scope["headers"]).get(b"x-request-id", b"")
            # For the application it is over: no other answer comes after this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        request_id = valid_request_id(given.decode("latin-1"))
        logger.warning("http_request_broken", reason=reason, request_id=request_id)
        body = ApiError(400, reason, code="invalid_http").body().encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", request_id),
        ]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._stop_waiting()
        self.limits.waiting[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _await_head(self) -> None:
        self.limits.waiting.setdefault(self, None)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.limits.head_timeout_s, self.transport.abort
            )

    def _stop_waiting(self) -> None:
        self.limits.waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """The protocol of one listener's connections, for uvicorn."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits})


def _certificate_names(transport: asyncio.Transport) -> tuple[str, ...]:
    # TLS has verified the certificate: without mTLS there is none.
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = (ssl_object and ssl_object.getpeercert()) or {}
    alternatives = certificate.get("subjectAltName", ())
    if alternatives:
        return tuple(name for kind, name in alternatives if kind in ("DNS", "URI"))
    pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    return tuple(value for key, value in pairs if key == "commonName")
