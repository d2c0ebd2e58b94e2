"""Connections that send slowly, too much, or nothing; too many of them; and the drain."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from starlette.types import Message
from structlog.testing import capture_logs

from gateway.api.openai.body import BodyReader
from gateway.errors import UnavailableError
from servicekit.config import ServerOptions
from tests.gateway.clients import write_clients
from tests.gateway.openai.clients import (
    connection,
    get,
    post,
    read_answer,
    request_bytes,
)
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_server import PATIENCE_S
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

BODY = {"model": "scripted", "prompt": [1, 2], "stream": True}
JSON = [(b"content-type", b"application/json")]
IMPATIENT = ServerOptions(listen="127.0.0.1:0", request_timeout_s=0.3)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection is closed."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
        return b""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HT",
        b"GET /health HTTP/1.1\r\nhost: x\r\n",
        # An answered request, then the beginning of the next one.
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea",
    ],
)
async def test_a_connection_without_a_whole_head_is_closed_in_time(
    start_api: StartApi, sent: bytes
) -> None:
    running = await start_api(server=IMPATIENT)
    async with connection(running) as (reader, writer):
        writer.write(sent)
        answered = await until_closed(reader)
    assert answered.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in sent)


async def test_a_body_that_comes_too_slowly_is_refused(start_api: StartApi) -> None:
    running = await start_api(server=IMPATIENT)
    async with connection(running) as (reader, writer):
        writer.write(request_bytes("/v1/completions", b'{"model"', content_length="100"))
        answer = await read_answer(reader)
    assert (answer.status, answer.error["code"]) == (408, "timeout")


async def test_a_tenant_that_sends_no_bodies_holds_up_only_itself(
    start_api: StartApi, verifier: ScriptedVerifier, tmp_path: Path
) -> None:
    verifier.play(lambda opened: [300])
    clients = write_clients(
        tmp_path / "clients.yaml", silent={"tokens": ["silent"]}, other={"tokens": ["other"]}
    )
    options = ServerOptions(listen="127.0.0.1:0", max_concurrent_calls=10)
    running = await start_api(server=options, clients=clients)
    silent = {"authorization": "Bearer silent"}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            _, writer = await stack.enter_async_context(connection(running))
            writer.write(request_bytes("/v1/completions", b"{", content_length="9", **silent))
        async with asyncio.timeout(PATIENCE_S):
            # Its heads come in their own time.
            while (answer := await post(running, "/v1/completions", BODY, **silent)).status != 429:
                pass
        assert answer.error["code"] == "rate_limit_exceeded"
        assert answer.headers["retry-after"] == "1"
        # So the error budget does not count it as Tandem's.
        num_refused = running.sample("tandem_request_errors_total", code="RESOURCE_EXHAUSTED")
        assert num_refused >= 1
        shed = running.sample("tandem_requests_shed_total", reason="tenant_bodies")
        assert shed == num_refused
        other = {"authorization": "Bearer other"}
        assert (await post(running, "/v1/completions", BODY, **other)).status == 200


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused(start_api: StartApi, is_announced: bool) -> None:
    running = await start_api()
    async with connection(running) as (reader, writer):
        if is_announced:
            writer.write(request_bytes("/v1/completions", b"", content_length="5000000"))
        else:
            head = request_bytes("/v1/completions", None, method="POST")
            head = head.replace(
                b"\r\n\r\n",
                b"\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            writer.write(head + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 65)
        answer = await read_answer(reader)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (b"GET /health HTTP/1.1\r\nauthorization secret\r\n\r\n", "illegal header line"),
        (b"secret\r\n\r\n", "illegal request line"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\nsecret\r\n",
            "illegal chunk header",
        ),
    ],
)
async def test_what_is_no_http_is_refused_with_the_reason(
    start_api: StartApi, sent: bytes, reason: str
) -> None:
    running = await start_api()
    with capture_logs() as log:
        async with connection(running) as (reader, writer):
            writer.write(sent)
            answer = await read_answer(reader)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert answer.error == {
        "message": f"the request is not valid HTTP: {reason}",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }
    request_id = answer.headers["x-request-id"]
    assert (request_id == "mine") == (b"mine" in sent)
    (entry,) = (each for each in log if each["event"] == "http_request_broken")
    assert (entry["reason"], entry["request_id"]) == (answer.error["message"], request_id)


async def answered_before_its_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    """Sends a request's head and reads its answer, which waits for no body; returns the body."""
    sent = request_bytes("/v1/unknown", BODY, connection="keep-alive")
    head, _, body = sent.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        await reader.readuntil(b"}}")
    return body


async def test_a_connection_stays_idle_after_a_body_that_no_answer_waited_for(
    start_api: StartApi,
) -> None:
    running = await start_api(server=IMPATIENT)
    async with connection(running) as (reader, writer):
        body = await answered_before_its_body(reader, writer)
        writer.write(body)
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(3 * IMPATIENT.request_timeout_s, passed.set)
        await passed.wait()
        writer.write(request_bytes("/health"))
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200 ")


async def test_the_connection_that_waits_longest_makes_room_for_a_new_one(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    options = ServerOptions(listen="127.0.0.1:0", max_concurrent_calls=3)
    running = await start_api(server=options)
    async with (
        connection(running) as (streaming, streaming_writer),
        connection(running) as (first, first_writer),
        connection(running) as (second, second_writer),
    ):
        streaming_writer.write(request_bytes("/v1/completions", BODY))
        opened = await verifier.nth("open", 0)
        # Both have been answered, the first one before the second.
        for reader, writer in ((first, first_writer), (second, second_writer)):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b'"serving"}')
        assert (await get(running, "/health")).status == 200
        assert await until_closed(first) == b""
        # Those that are being answered stay.
        second_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await second.readuntil(b'"serving"}')
        verifier.send(verifier.decided(opened.sequence_id, 2, [300], finish=STOP))
        assert b"[DONE]" in await until_closed(streaming)


async def test_a_drain_ends_streams_and_sends_new_requests_elsewhere(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    running = await start_api()
    async with connection(running) as (reader, writer):
        writer.write(request_bytes("/v1/completions", BODY))
        opened = await verifier.nth("open", 0)
        draining = asyncio.ensure_future(running.gateway.drain())
        await asyncio.sleep(0)
        refused = await post(running, "/v1/completions", BODY, connection="keep-alive")
        assert (refused.status, refused.error["type"]) == (503, "server_error")
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        verifier.send(verifier.decided(opened.sequence_id, 2, [300], finish=STOP))
        assert b"[DONE]" in await until_closed(reader)
        async with asyncio.timeout(PATIENCE_S):
            await draining


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_drain_ends_bodies_that_come_or_are_late_already(is_late: bool) -> None:
    reader = BodyReader(timeout_s=0.0 if is_late else 60.0, max_connections=1, on_shed=print)
    silent = asyncio.Event()

    async def receive() -> Message:
        await silent.wait()
        raise AssertionError

    async def read() -> None:
        async with reader.read({"headers": JSON}, receive, ""):
            pass

    first = asyncio.create_task(read())
    # It waits; where it is late, its end has begun.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.close()
    async with asyncio.timeout(PATIENCE_S):
        for reading in (first, read()):
            with pytest.raises(UnavailableError):
                await reading


async def test_it_is_not_ready_once_it_is_about_to_stop(start_api: StartApi) -> None:
    running = await start_api()
    for path in ("/ready", "/health"):
        assert (await get(running, path)).status == 200
    running.gateway.server.retire()
    for path in ("/ready", "/health"):
        answer = await get(running, path)
        assert (answer.status, json.loads(answer.body)) == (503, {"status": "not_serving"})
