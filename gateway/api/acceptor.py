"""Accepts connections, and counts each from its beginning.

An event loop that listens with TLS tells of a connection once its handshake is done. Until then
nothing counts it, and that may be a minute. And where descriptors lack, uvloop closes connections
without a word. So this accepts by itself: it bounds handshakes as connections, and says when none
can be accepted. One whose client has gone before is closed at once, which costs next to
nothing: the event loop and the request would cost more. On the event loop; knows no request.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from gateway.api.connection_limits import ConnectionLimits
from gateway.api.http_connection import GENERATES, BoundedConnection, has_ended
from gateway.api.turns import MAX_TURNS
from servicekit.logs import get_logger

logger = get_logger(__name__)

# Between two returns to the event loop: how many connections are accepted, as in asyncio. Of them,
# as many are kept as requests may begin: each makes work, and meanwhile nothing that runs goes on.
_MAX_ACCEPTED = 100
# Errors of a lack of descriptors or memory, and how long no more are accepted then; as asyncio.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0


class Acceptor:
    """The connections of one listening socket; `close` must be called."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext | None,
        limits: ConnectionLimits,
        make_connection: Callable[[], BoundedConnection],
    ) -> None:
        """Begins to accept.

        Args:
            listener: listens already; its owner closes it.
            context: of TLS; None: connections are plaintext.
            limits: a handshake may take as long as the head of a request.
            make_connection: the protocol of a connection.
        """
        self._listener = listener
        self._context = context
        self._limits = limits
        self._make_connection = make_connection
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}
        self._is_closed = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accepts no more, and closes the connections whose handshakes are not done; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            for handshake in self._handshakes.values():
                handshake.give_up()

    async def wait_closed(self) -> None:
        """Returns when no handshake is left; after `close`."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        num_kept = 0
        for _ in range(_MAX_ACCEPTED):
            if num_kept == MAX_TURNS:
                return
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    # Of the connection that was next, which is gone: see accept(2).
                    continue
                logger.warning("accepting_paused", reason=str(error), pause_s=_PAUSE_S)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            accepted.setblocking(False)
            if has_ended(accepted) and not self._may_be_answered(accepted):
                accepted.close()
                continue
            num_kept += 1
            handshake = _Handshake(accepted, self._limits)
            task = self._loop.create_task(self._shake_hands(handshake))
            self._handshakes[task] = handshake
            task.add_done_callback(self._handshakes.pop)
            self._limits.open(handshake)

    def _may_be_answered(self, ended: socket.socket) -> bool:
        """Whether a client that has ended its side may still read what it asked for: not where it
        must go on with a handshake, and no output of a model, which takes its time.
        """
        if self._context is not None:
            return False
        try:
            return ended.recv(len(GENERATES), socket.MSG_PEEK) not in (b"", GENERATES)
        except OSError:
            return False

    async def _shake_hands(self, handshake: "_Handshake") -> None:
        def begin() -> BoundedConnection:
            connection = self._make_connection()
            connection.handshake = handshake
            return connection

        try:
            # Any error is the client's; the loop closes the connection.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    begin,
                    handshake.accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._limits.head_timeout_s if self._context else None,
                )
        finally:
            self._limits.close(handshake)


class _Handshake:
    """A connection until its handshake is done; without TLS, there is nothing to be done."""

    def __init__(self, accepted: socket.socket, limits: ConnectionLimits) -> None:
        self.accepted = accepted
        self._limits = limits

    def give_up(self) -> None:
        """Ends it at once."""
        self._limits.close(self)
        # The handshake then fails. The client may have gone already.
        with contextlib.suppress(OSError):
            self.accepted.shutdown(socket.SHUT_RDWR)
