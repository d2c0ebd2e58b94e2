"""Bounds on HTTP connections: how many there are, and how long each may take to send a request.

uvicorn bounds the size of a request's head and how long a connection may stay idle between two
requests, but lets a client take forever for its first request, or for the head of any. Owns these
timers, and which connection goes when there is no room for a new one; one whose TLS handshake is
not done counts, too. Refuses what is not HTTP, and bodies in tiny chunks, with the reason. After an
answer that waited for no body, reads no more of it than is worth the connection. Knows no request.
"""

import asyncio
import functools
import http
import re
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.api.connection import Connection
from gateway.api.connection_limits import ConnectionLimits, Waiting
from gateway.api.lingering_transport import LingeringTransport
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

# The longest body of which the rest may come after the answer. Beyond it, the connection is closed.
_MAX_UNWANTED_BYTES = 64 * 1024

# Of TCP_INFO, which not every system has: the first byte is the connection's state, and this one's
# means that neither side has ended it.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_ESTABLISHED = 1

#: How a request begins that makes a model generate.
GENERATES = b"POST "

# What h11 quotes of a request in an error. It may be a token of the client's.
_QUOTED = re.compile(r":? (bytearray\()?b['\"].*", re.DOTALL)

# Of a target in absolute form: the scheme and the authority.
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class BrokenRequestError(Exception):
    """A request that breaks the protocol or a bound; the text says how, without quoting it.

    Not h11's: uvicorn would answer that without the reason.

    Attributes:
        status: of the answer.
    """

    def __init__(
        self, reason: str, *, status: http.HTTPStatus = http.HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(reason)
        self.status = status


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
            BrokenRequestError: the client breaks the protocol, its head is too long, or its chunks
                are too small.
        """
        num_bytes = len(self._receive_buffer)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                raise self._too_long() from error
            raise BrokenRequestError(
                f"the request is not valid HTTP: {_QUOTED.sub('', str(error))}"
            ) from error
        # h11 bounds only what is not complete yet.
        if (
            isinstance(event, h11.Request | h11.EndOfMessage)
            and num_bytes - len(self._receive_buffer) > self._max_incomplete_event_size
        ):
            raise self._too_long()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            return _as_it_is_read(event)
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

    def _too_long(self) -> BrokenRequestError:
        return BrokenRequestError(
            "the head of the request, or of a part of its body, is over the limit of "
            f"{self._max_incomplete_event_size} bytes",
            status=http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        )


def _as_it_is_read(request: h11.Request) -> h11.Request:
    """The request with a target as most clients write it (of an absolute one, path and query), and
    as the connection's last one if it has two lengths: h11 reads its chunks, another server between
    here and the client may have read the other length, and what follows may be of either (RFC 9112,
    section 6.1).
    """
    absolute = _ABSOLUTE.match(request.target)
    names = {name for name, _ in request.headers}
    has_two_lengths = names >= {b"content-length", b"transfer-encoding"}
    if absolute is None and not has_two_lengths:
        return request
    rest = request.target[absolute.end() :] if absolute else request.target
    headers = [each for each in request.headers if each[0] != b"content-length"]
    return h11.Request(
        method=request.method,
        headers=[*headers, (b"connection", b"close")] if has_two_lengths else request.headers,
        target=rest if not absolute or rest.startswith(b"/") else b"/" + rest,
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
        self._lingering = LingeringTransport(transport, self._may_be_sending)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        # A write waits for all before it, not for most of it: what is left unread is noticed.
        transport.set_write_buffer_limits(high=1)
        self._connection = Connection(
            abort=transport.abort,
            is_gone=functools.partial(_is_gone, transport),
            is_last=self._is_last,
            certificate_names=_certificate_names(transport),
        )
        self.app_state = {**self.app_state, "connection": self._connection}
        if self.handshake is not None:
            self.limits.close(self.handshake)
        self.limits.open(self)
        if self in self.limits.waiting:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            self._lingering.drop(data)
            return
        if data.startswith(GENERATES) and self._connection.is_gone():
            # To read it would cost more than all that was done for it.
            self._connection.abort()
            return
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
            self._refuse(error)
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

    def _refuse(self, error: BrokenRequestError) -> None:
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
        logger.warning("http_request_broken", reason=str(error), request_id=request_id)
        body = ApiError(error.status, str(error), code="invalid_http").body().encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", request_id),
        ]
        try:
            for event in (
                h11.Response(
                    status_code=error.status, headers=headers, reason=error.status.phrase.encode()
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.abort()
        else:
            self.transport.close()

    def _may_be_sending(self) -> bool:
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _is_last(self) -> bool:
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        headers = dict(self.headers)
        # One that waits for leave to send its body may send it or not, if it gets an answer.
        return (
            self.conn.they_are_waiting_for_100_continue
            or b"transfer-encoding" in headers
            or int(headers[b"content-length"]) > _MAX_UNWANTED_BYTES
        )

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


def has_ended(connection: socket.socket) -> bool:
    """Whether a client has ended its connection, or its own side of it, as far as the system tells;
    the event loop learns it from what it reads, after all that was sent before.
    """
    if _TCP_INFO is None:
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] != _ESTABLISHED
    except OSError:
        return True


def _is_gone(transport: asyncio.Transport) -> bool:
    return transport.is_closing() or has_ended(transport.get_extra_info("socket"))


def _certificate_names(transport: asyncio.Transport) -> tuple[str, ...]:
    # TLS has verified the certificate: without mTLS there is none.
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = (ssl_object and ssl_object.getpeercert()) or {}
    alternatives = certificate.get("subjectAltName", ())
    if alternatives:
        return tuple(name for kind, name in alternatives if kind in ("DNS", "URI"))
    pairs = [pair for part in certificate.get("subject", ()) for pair in part]
    return tuple(value for key, value in pairs if key == "commonName")
