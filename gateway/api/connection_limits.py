"""How many HTTP connections a listener has, and which goes when there is no room for a new one."""

from typing import Protocol


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
