"""A wire to one server that can be cut: a TCP proxy in a thread of its own.

Owns its connections. Does not know what they carry.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_CHUNK_BYTES = 1 << 16
_END_TIMEOUT_S = 5.0
# Closes with RST, without sending what is left.
_ABORT = struct.pack("ii", 1, 0)


class Link:
    """Forwards every connection to the server, until it is cut.

    For any thread; each call has taken effect when it returns.

    Attributes:
        address: where the link listens, HOST:PORT.
    """

    def __init__(self, to: str, listen: str) -> None:
        """Begins whole; `running_link` starts and stops it.

        Args:
            to: the server's address, HOST:PORT.
            listen: the link's; port 0 is any.
        """
        self.address = listen
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._loop = asyncio.new_event_loop()
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._is_over = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told: connections stay open."""
        self._call(self._is_whole.clear)

    def mend(self) -> None:
        """Forwards again, first what was held back."""
        self._call(self._is_whole.set)

    def reset(self) -> None:
        """Ends all connections with RST, at both sides; new ones are forwarded."""
        self._call(self._abort_all)

    def run(self, started: threading.Event) -> None:
        """Serves until `stop`; the body of the link's thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        host, _, port = self.address.rpartition(":")
        server = await asyncio.start_server(self._forward, host, int(port))
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        started.set()
        await self._is_over.wait()
        server.close()
        # Connections end by themselves then; asyncio logs handlers that are cancelled.
        self._is_whole.set()
        self._abort_all()
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=_END_TIMEOUT_S)

    def stop(self) -> None:
        """Ends all connections, and `run`."""
        self._loop.call_soon_threadsafe(self._is_over.set)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _abort_all(self) -> None:
        for writer in self._writers:
            _abort(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._to)
        except OSError:
            # The server is not there: nor is the link's end.
            _abort(writer)
            self._writers.discard(writer)
            return
        self._writers.add(there_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer)),
            asyncio.create_task(self._pump(there_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, there_writer):
                # Not abort: what the other side sent last still arrives.
                end.close()
                self._writers.discard(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._is_whole.wait()
                writer.write(chunk)
                await writer.drain()
            await self._is_whole.wait()  # an end is no news on a cut wire, either


@contextlib.contextmanager
def running_link(to: str, *, listen: str = "127.0.0.1:0") -> Iterator[Link]:
    """A link to a server; ended on exit."""
    link = Link(to, listen)
    started = threading.Event()
    thread = threading.Thread(target=link.run, args=[started], name="link", daemon=True)
    thread.start()
    started.wait()
    try:
        yield link
    finally:
        link.stop()
        thread.join()


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    writer.transport.abort()
