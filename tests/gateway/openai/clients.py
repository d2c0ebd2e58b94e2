"""Clients of a gateway's HTTP: the official one, and plain sockets."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import openai
import pydantic
from openai.types.responses import ResponseStreamEvent

from gateway.server import GatewayServer
from tests.gateway.scripted_server import PATIENCE_S

#: The official client itself reads what lacks members, too, and then fails where they are used.
RESPONSE_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


class Served(Protocol):
    """Whoever started a gateway."""

    @property
    def gateway(self) -> GatewayServer: ...


@contextlib.asynccontextmanager
async def official_client(
    running: Served, *, token: str = "any", max_retries: int = 0
) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client."""
    async with openai.AsyncOpenAI(
        base_url=f"http://{running.gateway.http_address}/v1",
        api_key=token,
        max_retries=max_retries,
        timeout=PATIENCE_S,
    ) as client:
        yield client


@dataclass
class Answer:
    """A whole answer over a plain socket."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def error(self) -> dict[str, Any]:
        """The answer's `error`."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of the stream's events; the last one is [DONE] or an error."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, rest = self.body.split("\n\n")
        assert rest == ""
        return [
            data if data == "[DONE]" else json.loads(data)
            for data in (event.removeprefix("data: ") for event in events)
        ]

    @property
    def typed_events(self) -> list[dict[str, Any]]:
        """The data of the stream's events that have a type, which is their name."""
        found = []
        for event in self.body.split("\n\n"):
            name, is_typed, data = event.removeprefix("event: ").partition("\ndata: ")
            if is_typed:
                found.append(json.loads(data))
                assert found[-1]["type"] == name
        return found


def request_bytes(
    path: str, body: Any = None, *, method: str | None = None, **headers: str
) -> bytes:
    """A request as it goes over the wire; `_` in a header's name stands for `-`."""
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    lines = {"host": "gateway", "connection": "close"}
    if body is not None:
        lines |= {"content-type": "application/json", "content-length": str(len(content))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in lines.items()]
    return "\r\n".join([*head, "", ""]).encode() + content


@contextlib.asynccontextmanager
async def connection(
    running: Served, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain socket."""
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def served_connection(running: Served) -> Any:
    """The server's side of the only connection."""
    listener = running.gateway._http
    assert listener is not None
    (found,) = listener._server.server_state.connections
    return found


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Reads an answer to the end of its connection."""
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {line.split(": ")[0].lower(): line.split(": ", 1)[1] for line in lines}
    assert len(headers) == len(lines), "a header is repeated"
    if headers.get("transfer-encoding") == "chunked":
        body = _join_chunks(body)
    return Answer(int(status_line.split()[1]), headers, body.decode())


async def exchange(running: Served, sent: bytes, tls: ssl.SSLContext | None = None) -> Answer:
    """Sends bytes and reads the answer to the end of the connection."""
    async with connection(running, tls) as (reader, writer):
        writer.write(sent)
        return await read_answer(reader)


async def post(running: Served, path: str, body: Any, **headers: str) -> Answer:
    """Sends one request."""
    return await exchange(running, request_bytes(path, body, **headers))


async def get(running: Served, path: str, **headers: str) -> Answer:
    """Sends one request."""
    return await exchange(running, request_bytes(path, **headers))


def _join_chunks(body: bytes) -> bytes:
    joined = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        joined, body = joined + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return joined
