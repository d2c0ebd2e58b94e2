"""Receiving a request's body, and noticing that its client is gone.

Owns the bounds on bodies: on one, on all that are being received or wait to be read, on a tenant's
share of these, and on how long one may take to come; once the server shuts down, no longer.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from starlette.types import Receive, Scope

from gateway.api.openai.errors import ApiError
from gateway.api.turns import ClientGoneError
from gateway.errors import shutting_down
from servicekit.channels.limits import MAX_MESSAGE_BYTES
from servicekit.shares import leaves_room

# Of all bodies that are being received or wait to be read; as much as gRPC receives at a time.
_MAX_RECEIVED_BYTES = 64 * MAX_MESSAGE_BYTES


class BodyReader:
    """Receives the bodies of one listener's requests."""

    def __init__(
        self, *, timeout_s: float, max_connections: int, on_shed: Callable[[str], None]
    ) -> None:
        """Args:
        timeout_s: how long a body may take.
        max_connections: each body has one.
        on_shed: called with the reason for each body that finds no room.
        """
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._on_shed = on_shed
        self._num_bytes = 0
        # By tenant; those without any are left out.
        self._num_bodies: Counter[str] = Counter()
        # Of the bodies that are being received.
        self._limits: set[asyncio.Timeout] = set()
        self._is_closed = False

    def close(self) -> None:
        """The server shuts down: refuses the bodies that are not here yet, now and later, since
        their requests would be refused once they are.
        """
        self._is_closed = True
        self._timeout_s = 0.0
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def read(self, scope: Scope, receive: Receive, tenant: str) -> AsyncIterator[bytes]:
        """The whole body of a request of type JSON. It counts among those that are there until the
        context ends: leave it once the body is parsed.

        Args:
            tenant: its client's; "": clients are not authenticated, and there are no shares.

        Raises:
            ApiError: it is of another type, too large or too slow, or too many are being received.
            UnavailableError: the server shuts down.
            ClientGoneError: the client went away.
        """
        held = self._num_bodies[tenant]
        num_free = self._max_connections - self._num_bodies.total()
        if tenant and not leaves_room(held=held, added=1, num_free=num_free):
            self._on_shed("tenant_bodies")
            raise _too_many(f"{held} other requests of this client are being received, its share")
        self._num_bodies[tenant] += 1
        parts: list[bytes] = []
        try:
            await self._receive(scope, receive, parts)
            parts[:] = [b"".join(parts)]
            yield parts[0]
        finally:
            self._num_bytes -= sum(map(len, parts))
            self._num_bodies[tenant] -= 1
            if not self._num_bodies[tenant]:
                del self._num_bodies[tenant]

    async def _receive(self, scope: Scope, receive: Receive, parts: list[bytes]) -> None:
        """Appends the body's parts, and counts their bytes."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        # Other types are what pages of other origins may send without asking.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise _unsupported("the body's content-type must be application/json")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise _unsupported("the body must have no content-encoding but identity")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_MESSAGE_BYTES:
            raise _too_large()
        before = self._num_bytes
        num_bytes = 0
        limit = asyncio.timeout(self._timeout_s)
        self._limits.add(limit)
        try:
            async with limit:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    more = message.get("more_body", False)
                    parts.append(part)
                    num_bytes += len(part)
                    self._num_bytes += len(part)
                    if num_bytes > MAX_MESSAGE_BYTES:
                        raise _too_large()
                    if self._num_bytes > _MAX_RECEIVED_BYTES:
                        self._on_shed("bodies")
                        raise _too_many(f"{before} bytes of other requests are there")
        except TimeoutError:
            if self._is_closed:
                raise shutting_down() from None
            raise ApiError(
                408,
                f"the body did not come within {self._timeout_s} s",
                code="timeout",
                headers={"connection": "close"},
            ) from None
        finally:
            self._limits.discard(limit)


@contextlib.asynccontextmanager
async def ended_by_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs in the context when the client goes away; after its body was read.

    Raises:
        ClientGoneError: the client went away.
    """
    limit = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        limit.reschedule(0)

    try:
        async with limit:
            watching = asyncio.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientGoneError from None


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")


def _too_many(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": "1"},
    )


def _too_large() -> ApiError:
    return ApiError(
        413, f"the body is over the limit of {MAX_MESSAGE_BYTES} bytes", code="request_too_large"
    )
