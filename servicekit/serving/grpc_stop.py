"""How a gRPC server stops, whoever asks for it and however often.

Owns the one graceful stop of a server: grpc.aio's own, called again while it runs, can use the
server that the first call has freed, which ends the process with a segmentation fault.
"""

import asyncio

import grpc

# Longer than anybody waits: calls are cancelled by `stop` alone.
_GRACE_S = 1e6


class GrpcStop:
    """The stop of one server; on its event loop."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self._stopping: asyncio.Task[None] | None = None

    def begin(self) -> "asyncio.Task[None]":
        """Refuses new calls and sends every client a GOAWAY; the task ends with the last call."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(_GRACE_S))
        return self._stopping

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives those in flight `grace_s` to end, cancels them.

        May be called again, also while it runs: the shortest grace counts.
        """
        stopping = self.begin()
        _, unfinished = await asyncio.wait([stopping], timeout=grace_s)
        if unfinished:
            # Without a grace, nothing is awaited between the look whether the server is there and
            # its use.
            await self._server.stop(None)
        await asyncio.shield(stopping)
