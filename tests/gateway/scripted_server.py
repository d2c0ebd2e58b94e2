"""The server of stand-ins for verifiers, and the records that tests wait for."""

import asyncio
from collections.abc import Callable

import grpc

from servicekit.channels.limits import MAX_RECEIVE_BYTES

#: How long tests wait before they fail.
PATIENCE_S = 60.0


class ScriptedServer:
    """A real gRPC server around a servicer that records what it receives.

    Attributes:
        address: of the server, once it is started.
    """

    def __init__(self) -> None:
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._recorded = asyncio.Condition()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server."""
        raise NotImplementedError

    async def start(
        self, listen: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
            ]
        )
        self.register(self._server)
        host = listen.rpartition(":")[0]
        port = (
            self._server.add_insecure_port(listen)
            if credentials is None
            else self._server.add_secure_port(listen, credentials)
        )
        self.address = f"{host}:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the records fulfil a condition."""
        async with asyncio.timeout(PATIENCE_S), self._recorded:
            await self._recorded.wait_for(condition)

    async def notify(self) -> None:
        """Something was recorded."""
        async with self._recorded:
            self._recorded.notify_all()
