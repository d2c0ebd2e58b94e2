"""A transport whose closing lets the client read the last answer first.

A socket that is closed with bytes unread resets its connection, and the client may lose an answer
that it has not read. So where a client may still be sending, only this side of the connection ends
at first, and what still comes is dropped unseen, up to a bound. Owns that bound, in bytes and in
time. Knows no HTTP.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from servicekit.channels.limits import MAX_MESSAGE_BYTES

# Read and dropped: as much as a body may have. Many clients send all of it before they read.
MAX_DROPPED_BYTES = MAX_MESSAGE_BYTES
# Until the client has read the answer, and closes. The connection costs nothing meanwhile.
_LINGER_S = 2.0


class LingeringTransport:
    """A connection's transport, as its protocol sees it.

    Attributes:
        is_lingering: what comes belongs to `drop`.
    """

    def __init__(self, transport: asyncio.Transport, must_linger: Callable[[], bool]) -> None:
        """Wraps a transport.

        Args:
            must_linger: whether the client may still be sending.
        """
        self.is_lingering = False
        self.write = transport.write
        self._transport = transport
        self._must_linger = must_linger
        self._num_bytes_left = MAX_DROPPED_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self.is_lingering or bool(self._transport.is_closing())

    def close(self) -> None:
        """Sends what was written, and closes the connection: soon, if the client may be sending; at
        once, if this was called before.
        """
        if self._transport.is_closing():
            return
        if self.is_lingering:
            self._transport.abort()
        elif not self._must_linger():
            self._transport.close()
        else:
            self.is_lingering = True
            # With TLS, no side can end alone. The client may have reset the connection.
            if self._transport.can_write_eof():
                with contextlib.suppress(OSError):
                    self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def drop(self, data: bytes) -> None:
        """Takes what has come, without a look at it; beyond the bound, reads nothing more."""
        self._num_bytes_left -= len(data)
        if self._num_bytes_left <= 0:
            self._transport.pause_reading()
