"""After an answer that waited for no body: what is read of it, and that the answer arrives."""

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.api import lingering_transport
from gateway.api.http_connection import BoundedConnection
from gateway.api.lingering_transport import MAX_DROPPED_BYTES
from tests.gateway.running_gateway import until
from tests.gateway.running_listener import HttpsClient, Run, is_answered, until_closed
from tests.gateway.scripted_server import PATIENCE_S
from tests.volume import cases

# What an event loop reads at a time.
READ_BYTES = 256 * 1024

BY_LENGTH = "content-length: 1000000000000"
BY_CHUNKS = "transfer-encoding: chunked"


def head(line: str, *fields: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{line} HTTP/1.1", "host: x", *fields, "", ""]).encode()


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head of an answer, and its body."""
    async with asyncio.timeout(PATIENCE_S):
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        _, _, rest = answer_head.partition(b"content-length: ")
        return answer_head, await reader.readexactly(int(rest.split(b"\r\n")[0]))


@pytest.fixture(autouse=True)
def short_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read is soon no more waited for."""
    monkeypatch.setattr(lingering_transport, "_LINGER_S", 0.2)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all that connections were given."""
    lengths: list[int] = []
    receive = BoundedConnection.data_received

    def counted(self: BoundedConnection, data: bytes) -> None:
        lengths.append(len(data))
        receive(self, data)

    monkeypatch.setattr(BoundedConnection, "data_received", counted)
    return lengths


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize(
    ("line", "framing", "piece"),
    [
        ("POST /nope", BY_LENGTH, b"x" * 65_536),
        ("POST /health", BY_CHUNKS, (b"480\r\n" + b"x" * 0x480 + b"\r\n") * 64),
        ("GET /health", BY_CHUNKS, b"1\r\nx\r\n" * 8_192),
        ("POST /nope", BY_CHUNKS, b"no chunk\r\n" * 8_192),
    ],
)
def test_a_body_without_end_is_not_read_after_the_answer(
    run: Run, num_read: list[int], *, has_tls: bool, line: str, framing: str, piece: bytes
) -> None:
    async def scenario(client: HttpsClient) -> None:
        async with client.connection(has_tls=has_tls) as (reader, writer):
            writer.write(head(line, framing))
            answer_head, _ = await answer_of(reader)
            assert b"\r\nconnection: close\r\n" in answer_head
            del num_read[:]
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        writer.write(piece)
                        await writer.drain()
        assert sum(num_read) <= MAX_DROPPED_BYTES + READ_BYTES
        assert await client.is_served()

    run(scenario, has_tls=has_tls, request_timeout_s=10 * PATIENCE_S)


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_client_that_sends_all_before_it_reads_gets_its_answer(
    run: Run, num_read: list[int], *, has_tls: bool
) -> None:
    async def scenario(client: HttpsClient) -> None:
        num_bytes = 3 * MAX_DROPPED_BYTES // 4
        async with client.connection(has_tls=has_tls) as (reader, writer):
            writer.write(head("POST /nope", f"content-length: {num_bytes}"))
            await until(lambda: bool(num_read))
            writer.write(b"x" * num_bytes)
            await until(lambda: sum(num_read) >= num_bytes)
            answer_head, body = await answer_of(reader)
            assert answer_head.startswith(b"http/1.1 404 ")
            assert body.endswith(b"}}")
            if not has_tls:
                # It ends, and is not reset.
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""

    run(scenario, has_tls=has_tls, request_timeout_s=10 * PATIENCE_S)


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_rest_of_a_short_body_leaves_the_connection_open(run: Run, *, has_tls: bool) -> None:
    async def scenario(client: HttpsClient) -> None:
        async with client.connection(has_tls=has_tls) as (reader, writer):
            writer.write(head("POST /nope", "content-length: 20000"))
            answer_head, _ = await answer_of(reader)
            assert b"connection:" not in answer_head
            writer.write(b"x" * 20_000)
            assert await is_answered(reader, writer)

    run(scenario, has_tls=has_tls, request_timeout_s=10 * PATIENCE_S)


@pytest.mark.parametrize("has_tls", cases([False], [False, True]))
@pytest.mark.parametrize("is_length_first", [False, True])
@pytest.mark.parametrize("line", ["POST /nope", "GET /health"])
def test_a_request_with_two_lengths_is_its_connection_s_last(
    run: Run, *, has_tls: bool, line: str, is_length_first: bool
) -> None:
    fields = ["Content-Length: 5", "Transfer-Encoding: chunked"]
    if not is_length_first:
        fields.reverse()

    async def scenario(client: HttpsClient) -> None:
        async with client.connection(has_tls=has_tls) as (reader, writer):
            # To one that goes by its length, another request follows its body.
            writer.write(head(line, *fields) + b"0\r\n\r\n" + head("GET /ready"))
            answer_head, _ = await answer_of(reader)
            assert b"\r\nconnection: close\r\n" in answer_head
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""

    run(scenario, has_tls=has_tls, request_timeout_s=10 * PATIENCE_S)


LONG_FIELDS: dict[str, Any] = {
    "one field": ["x-long: " + "x" * 70_000],
    "many fields": [f"x-{index}: {'x' * 100}" for index in range(400)],
    "barely": ["x-long: " + "x" * (32 * 1024 - len(head("GET /health", "x-long: ")) + 1)],
}


@pytest.mark.parametrize("has_tls", cases([False], [False, True]))
@pytest.mark.parametrize("piece_bytes", cases([1 << 20, 10_000], [1 << 20, 40_000, 10_000]))
@pytest.mark.parametrize("fields", LONG_FIELDS.values(), ids=LONG_FIELDS)
def test_a_head_over_the_limit_is_refused_however_it_arrives(
    run: Run, *, has_tls: bool, piece_bytes: int, fields: list[str]
) -> None:
    sent = head("GET /health", *fields)

    async def scenario(client: HttpsClient) -> None:
        async with client.connection(has_tls=has_tls) as (reader, writer):
            for start in range(0, len(sent), piece_bytes):
                writer.write(sent[start : start + piece_bytes])
                await asyncio.sleep(0)
            answer_head, body = await answer_of(reader)
            assert answer_head.startswith(b"http/1.1 431 ")
            assert b"over the limit of 32768 bytes" in body
            await until_closed(reader)

    run(scenario, has_tls=has_tls, request_timeout_s=10 * PATIENCE_S)
