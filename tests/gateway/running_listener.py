"""An HTTP listener alone, with TLS or without, on asyncio's own loop and on uvloop; its clients."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import trustme
import uvloop
from prometheus_client import CollectorRegistry

from gateway.api.http import HttpListener
from gateway.errors import OverloadedError
from servicekit.channels.tls import watch_server_certificate
from servicekit.config import ServerOptions
from servicekit.serving.client_waits import ClientWaits
from tests.gateway.scripted_server import PATIENCE_S

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpsClient:
    """Of one listener.

    Attributes:
        serving: the listener's task.
    """

    def __init__(
        self, address: str, context: ssl.SSLContext | None, serving: "asyncio.Future[None]"
    ) -> None:
        self.serving = serving
        self._host, port = address.split(":")
        self._port = int(port)
        self._context = context

    @contextlib.asynccontextmanager
    async def connection(self, *, has_tls: bool) -> AsyncIterator[Pair]:
        """A connection; without TLS, its handshake never begins."""
        context = self._context if has_tls else None
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def is_served(self) -> bool:
        """Whether a new client gets its answer."""
        async with self.connection(has_tls=True) as pair:
            return await is_answered(*pair)


async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        return (await reader.readuntil(b'"serving"}')).startswith(b"HTTP/1.1 200")


async def until_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            await reader.read()


#: Runs a scenario against a listener with these options.
Run = Callable[..., None]


def listener_run(loop_name: str, tmp_path: Path) -> Run:
    """Runs scenarios on a loop of `asyncio` or `uvloop`; nothing may be left of them."""
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    pem = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)

    def run(
        scenario: Callable[[HttpsClient], Awaitable[None]], *, has_tls: bool = True, **fields: Any
    ) -> None:
        if has_tls:
            fields |= {"tls_cert": pem, "tls_key": pem}
        options = ServerOptions(listen="127.0.0.1:0", **fields)

        async def main() -> None:
            errors: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, each: errors.append(each))

            def unread_error() -> Exception:
                errors.append("an answer was left unread")
                return OverloadedError(errors[-1])

            listener = HttpListener(
                listen="127.0.0.1:0",
                options=options,
                certificate=watch_server_certificate(options, on_reload=lambda _: None),
                registry=CollectorRegistry(),
                routes=[],
                allowed_origins=(),
                refuse_metrics=None,
                is_ready=lambda: True,
                client_waits=ClientWaits(
                    unread_timeout_s=PATIENCE_S, make_unread_error=unread_error
                ),
            )
            serving = asyncio.ensure_future(listener.run())
            try:
                await scenario(HttpsClient(listener.address, context if has_tls else None, serving))
            finally:
                serving.cancel()
                await asyncio.wait([serving])
            assert not errors
            assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left"
            used: Any = listener._server.servers[0]
            assert not used._handshakes
            assert not used._limits._open

        factory = uvloop.new_event_loop if loop_name == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    return run
