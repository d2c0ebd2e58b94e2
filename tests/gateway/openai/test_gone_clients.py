"""Clients that open requests and are gone: their requests never begin, and hold up no others."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import h11
import pytest
import trustme

from gateway.api.frontend import Frontend
from gateway.api.http_connection import RequestParser
from gateway.text.tokenizer import Tokenizer
from servicekit.config import ServerOptions
from tests.gateway.openai.clients import exchange, post, request_bytes
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import RunningGateway, until
from tests.gateway.scripted_server import PATIENCE_S
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

NUM_CLIENTS = 100
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TOKENS = {"model": "scripted", "prompt": [1, 2], "stream": True}
REQUESTS: dict[str, bytes] = {
    "completion": request_bytes("/v1/completions", TOKENS),
    "whole": request_bytes("/v1/completions", TOKENS | {"stream": False}),
    "prompts": request_bytes("/v1/completions", TOKENS | {"prompt": ["a", "b", "c"]}),
    "long text": request_bytes("/v1/completions", TOKENS | {"prompt": "word " * 400}),
    "long body": request_bytes("/v1/completions", TOKENS | {"prompt": "word " * 40_000}),
    "chat": request_bytes("/v1/chat/completions", CHAT, connection="keep-alive"),
    "response": request_bytes("/v1/responses", {"model": "scripted", "input": "hi"}),
    "pipelined": 3 * request_bytes("/v1/completions", TOKENS, connection="keep-alive"),
}


def end(client: socket.socket) -> None:
    client.close()


def end_one_side(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done for requests: they began, or a text was encoded."""
    done: list[str] = []
    generate, encode = Frontend.generate, Tokenizer.encode

    def counted_generate(self: Frontend, *args: Any, **kwargs: Any) -> Any:
        done.append("generate")
        return generate(self, *args, **kwargs)

    def counted_encode(self: Tokenizer, *args: Any, **kwargs: Any) -> Any:
        done.append("encode")
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Frontend, "generate", counted_generate)
    monkeypatch.setattr(Tokenizer, "encode", counted_encode)
    return done


def connect(running: RunningGateway) -> socket.socket:
    """A connection that the gateway has not accepted yet: the event loop does nothing meanwhile."""
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


async def check_none_began(
    running: RunningGateway, verifier: ScriptedVerifier, begun: list[str]
) -> None:
    """What comes after them is served, by when all of them have had their turns."""
    verifier.play(lambda opened: [300, STOP])
    assert (await post(running, "/v1/completions", TOKENS)).status == 200
    listener = running.gateway._http
    assert listener is not None
    await until(lambda: not listener._server.server_state.connections)
    assert begun == ["generate"]
    assert len(verifier.commands("open")) == 1
    assert running.sample("tandem_requests_received_total") == 1
    assert [each for each in running.log if each["log_level"] in ("warning", "error")] == []
    await running.until_idle()


@pytest.mark.parametrize("leave", [end, end_one_side, reset])
@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
async def test_the_requests_of_clients_that_left_before_they_were_accepted_never_begin(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    begun: list[str],
    sent: bytes,
    leave: Callable[[socket.socket], None],
) -> None:
    running = await start_api()
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            client = stack.enter_context(connect(running))
            client.setblocking(False)
            client.send(sent)
            leave(client)
        await check_none_began(running, verifier, begun)


@contextlib.asynccontextmanager
async def accepted(
    running: RunningGateway, number: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Connections whose handshakes are done."""
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(number):
            _, writer = await asyncio.open_connection(host, int(port), ssl=tls)
            writers.append(writer)
        listener = running.gateway._http
        assert listener is not None
        await until(lambda: len(listener._server.server_state.connections) == number)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


def send_and_leave(writers: list[asyncio.StreamWriter], sent: bytes) -> None:
    """The event loop does nothing meanwhile."""
    for writer in writers:
        writer.write(sent)
        assert not writer.transport.get_write_buffer_size()
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("name", ["completion", "prompts", "chat", "response", "pipelined"])
async def test_the_requests_of_clients_that_left_with_their_bodies_never_begin(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    begun: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    *,
    has_tls: bool,
) -> None:
    authority = trustme.CA()
    pem = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    options = ServerOptions(
        listen="127.0.0.1:0",
        tls_cert=pem if has_tls else None,
        tls_key=pem if has_tls else None,
    )
    heads: list[h11.Request] = []
    next_event = RequestParser.next_event

    def counted_next_event(self: RequestParser) -> Any:
        event = next_event(self)
        if isinstance(event, h11.Request):
            heads.append(event)
        return event

    monkeypatch.setattr(RequestParser, "next_event", counted_next_event)
    running = await start_api(server=options)
    async with accepted(running, 20, context if has_tls else None) as writers:
        send_and_leave(writers, REQUESTS[name])
        verifier.play(lambda opened: [300, STOP])
        sent = request_bytes("/v1/completions", TOKENS)
        assert (await exchange(running, sent, context if has_tls else None)).status == 200
        listener = running.gateway._http
        assert listener is not None
        await until(lambda: not listener._server.server_state.connections)
    assert len(heads) == 1, "those of the others are not even read"
    assert begun == ["generate"]
    assert len(verifier.commands("open")) == 1


@pytest.mark.parametrize("name", ["prompts", "long text", "chat", "response"])
async def test_those_whose_clients_leave_while_they_are_prepared_are_never_opened(
    start_api: StartApi, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    running = await start_api()
    verifier.play(lambda opened: [300, STOP])
    encode = Tokenizer.encode
    async with accepted(running, NUM_CLIENTS) as writers:

        def left_encode(self: Tokenizer, *args: Any, **kwargs: Any) -> Any:
            for writer in writers:
                writer.transport.abort()
                # The event loop closes it only later.
                with contextlib.suppress(OSError):
                    writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            return encode(self, *args, **kwargs)

        monkeypatch.setattr(Tokenizer, "encode", left_encode)
        for writer in writers:
            writer.write(REQUESTS[name])
        listener = running.gateway._http
        assert listener is not None
        await until(lambda: not listener._server.server_state.connections)
        await running.until_idle()
    assert (await post(running, "/v1/completions", TOKENS)).status == 200
    assert len(verifier.commands("open")) == 1
    statuses = Counter(each["status"] for each in running.log if each["event"] == "request_ended")
    assert statuses.pop("OK") == 1
    assert 0 < statuses.pop("CANCELLED") < NUM_CLIENTS
    assert not statuses
    assert [each for each in running.log if each["log_level"] in ("warning", "error")] == []


async def test_what_answers_at_once_is_answered_to_one_that_ended_its_own_side(
    start_api: StartApi,
) -> None:
    running = await start_api()
    client = connect(running)
    client.sendall(request_bytes("/health"))
    client.shutdown(socket.SHUT_WR)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    with client:
        async with asyncio.timeout(PATIENCE_S):
            assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200 ")
