"""Streams: their form, their texts, their errors; and clients that go away or do not read."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest

from gateway.api.openai.writing import answer_writer
from gateway.api.request_record import RequestRecord
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import (
    connection,
    exchange,
    official_client,
    post,
    read_answer,
    request_bytes,
    served_connection,
)
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import until
from tests.gateway.scripted_server import PATIENCE_S
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

Texts = Callable[[str], list[int]]


UNREAD_TOKENS = 1_600_000

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")

RESOURCE_EXHAUSTED, INVALID_ARGUMENT, INTERNAL, UNAVAILABLE = 8, 3, 13, 14


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": [1, 2], "stream": True, "max_tokens": 500, **fields}


async def deltas(running: Any, **fields: Any) -> list[str]:
    """The texts of a stream's chunks."""
    answer = await post(running, "/v1/completions", body(**fields))
    assert answer.events[-1] == "[DONE]"
    return [choice["text"] for event in answer.events[:-1] for choice in event["choices"]]


@pytest.mark.parametrize(
    ("completed", "text"), [(True, "aé日本x"), (False, "aé日\N{REPLACEMENT CHARACTER}x")]
)
async def test_an_echo_leaves_the_character_that_it_begins_to_the_output(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, completed: bool, text: str
) -> None:
    *prompt, last = texts("aé日本")
    verifier.play(lambda opened: [*([last] if completed else []), *texts("x"), 0])
    running = await start_api()
    fields = {"prompt": prompt, "echo": True}
    assert "".join(await deltas(running, **fields)) == text
    whole = await post(running, "/v1/completions", body(**fields, stream=False))
    assert json.loads(whole.body)["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_chunk_states_the_tokens_so_far_on_request(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, path: str
) -> None:
    # Characters of several tokens: some tokens come without a chunk.
    text = "aé日本語x"
    verifier.play(lambda opened: [*texts(text), 0])
    running = await start_api(stream_interval_s=0)
    fields = body(n=2, stream_options={"include_usage": True, "continuous_usage_stats": True})
    if "chat" in path:
        fields["messages"] = [{"role": "user", "content": "x"}]
        del fields["prompt"]
    answer = await post(running, path, fields)
    *chunks, last, done = answer.events
    assert done == "[DONE]"
    total = {name: last["usage"][name] for name in COUNTS}
    assert total["completion_tokens"] == 2 * (len(texts(text)) + 1)
    # The roles come before the prompt's tokens are counted.
    counted = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
    assert len(chunks) - len(counted) == (2 if "chat" in path else 0)
    for usage in counted:
        assert usage["prompt_tokens"] == total["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    so_far = [usage["completion_tokens"] for usage in counted]
    assert so_far == sorted(so_far)
    assert so_far[0] < total["completion_tokens"]
    assert counted[-1] == total
    alone = await post(
        running, path, {**fields, "stream_options": {"continuous_usage_stats": True}}
    )
    assert not any("usage" in chunk for chunk in alone.events[:-1])


async def test_each_prompt_has_its_choices(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    verifier.play(lambda opened: [*texts(f"after {opened.token_ids[0]}"), 0])
    running = await start_api()
    fields = {"prompt": [[7], [8], [9]], "n": 2, "max_tokens": 99}
    whole = json.loads((await post(running, "/v1/completions", body(**fields, stream=False))).body)
    expected = [f"after {prompt}" for prompt in (7, 7, 8, 8, 9, 9)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == 3
    answer = await post(running, "/v1/completions", body(**fields))
    streamed = [""] * 6
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "status", "headers"),
    [
        (RESOURCE_EXHAUSTED, 429, {"retry-after": "2", "retry-after-ms": "1500"}),
        (UNAVAILABLE, 503, {"retry-after": "2"}),
        (INVALID_ARGUMENT, 400, {}),
        (INTERNAL, 500, {}),
    ],
)
async def test_a_request_that_its_verifier_refuses_has_the_right_status(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    stream: bool,
    code: int,
    status: int,
    headers: dict[str, str],
) -> None:
    running = await start_api()
    async with connection(running) as (reader, writer):
        writer.write(request_bytes("/v1/completions", body(stream=stream)))
        opened = await verifier.nth("open", 0)
        retry_after_ms = 1500 if headers else 0
        verifier.send(
            verifier.rejected(
                opened.sequence_id, code=code, message="no", retry_after_ms=retry_after_ms
            )
        )
        answer = await read_answer(reader)
    assert (answer.status, answer.error["message"]) == (status, "no")
    assert headers.items() <= answer.headers.items()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_of_the_gateway_is_logged_once_and_leaks_nothing(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    running = await start_api()

    def fail(*_: object) -> None:
        raise OSError("the password is tulip")

    monkeypatch.setattr(RequestRecord, "opened", fail)
    answer = await post(running, "/v1/completions", body(stream=stream))
    assert answer.status == 500
    assert answer.error == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    [entry] = [each for each in running.log if each["event"] == "http_request_failed"]
    assert entry["exc_info"]
    await running.until_idle()


async def test_an_error_in_a_stream_names_the_parameter_as_the_client_named_it(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    running = await start_api()
    async with official_client(running) as client:
        creating = asyncio.ensure_future(
            client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "x"}],
                response_format={"type": "json_object"},
                stream=True,
            )
        )
        opened = await verifier.nth("open", 0)
        verifier.send(verifier.decided(opened.sequence_id, len(opened.token_ids), texts("ab")))
        stream = await creating
        await anext(stream)
        field = "sampling.structured_output.json_schema"
        verifier.send(verifier.rejected(opened.sequence_id, code=3, message="broken", field=field))
        with pytest.raises(openai.APIError, match="broken") as caught:
            async for _ in stream:
                pass
        assert caught.value.param == "response_format"
    await running.until_idle()


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "waiting"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_goes_away_frees_its_request(
    start_api: StartApi, verifier: ScriptedVerifier, is_running: bool, stream: bool
) -> None:
    running = await start_api()
    async with connection(running) as (reader, writer):
        writer.write(request_bytes("/v1/completions", body(stream=stream)))
        opened = await verifier.nth("open", 0)
        if is_running:
            verifier.send(verifier.decided(opened.sequence_id, 2, [5]))
            if stream:
                async with asyncio.timeout(PATIENCE_S):
                    await reader.readuntil(b"data: ")
    closed = await verifier.nth("close", 0)
    assert closed.sequence_id == opened.sequence_id
    await running.until_idle()
    http = running.gateway._http
    assert http is not None
    await http.drain()
    assert not [each for each in running.log if each["event"] == "http_request_failed"]


@pytest.mark.parametrize(
    ("stream", "finish"),
    [(True, 0), (True, STOP), (False, STOP)],
    ids=["running stream", "ended stream", "whole"],
)
async def test_a_client_that_does_not_read_is_cut_off(
    start_api: StartApi,
    start_verifier: StartVerifier,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    finish: int,
) -> None:
    verifier = await start_verifier(max_model_len=1 << 21)
    running = await start_api(
        verifiers=[verifier.address], unread_timeout_s=0.4, max_concurrent_requests=1
    )
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        fields = {"return_token_ids": True, "max_tokens": 1 << 21, "stream": stream}
        await loop.sock_sendall(client, request_bytes("/v1/completions", body(**fields)))
        opened = await verifier.nth("open", 0)
        send_long_output(verifier, opened.sequence_id, finish=finish)
        if not finish:
            await verifier.nth("close", 0)
        await running.until_idle()
        await until(lambda: running.sample("tandem_requests_unread_total") == 1)
        [line] = [entry for entry in running.log if entry["event"] == "request_ended"]
        # An answer that is not streamed is only sent when its request has ended.
        assert line["status"] == ("RESOURCE_EXHAUSTED" if stream else "OK")
        # Its place is free, although it still holds its end of the connection.
        verifier.play(lambda opened: [5, 0])
        answer = await post(running, "/v1/completions", body())
        assert answer.events[-1] == "[DONE]"
        last = b""
        async with asyncio.timeout(PATIENCE_S):
            # What the gateway still had is dropped: the end never comes.
            with contextlib.suppress(ConnectionResetError):
                while received := await loop.sock_recv(client, 1 << 16):
                    last = received
        assert b"[DONE]" not in last
        assert b"usage" not in last
    # It is no error of the gateway.
    assert [each for each in caplog.records if each.name == "uvicorn.error"] == []


async def test_a_drain_waits_until_the_last_bytes_of_an_answer_are_taken(
    start_api: StartApi, start_verifier: StartVerifier
) -> None:
    verifier = await start_verifier(max_model_len=1 << 14)
    running = await start_api(verifiers=[verifier.address])
    assert running.gateway.http_address is not None
    host, port = running.gateway.http_address.split(":")
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        fields = {"return_token_ids": True, "max_tokens": 1 << 13, "stream": False}
        await loop.sock_sendall(client, request_bytes("/v1/completions", body(**fields)))
        opened = await verifier.nth("open", 0)
        transport = served_connection(running).transport
        served = transport.get_extra_info("socket")
        served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # Less than a transport buffers before it pauses, by default.
        verifier.send(verifier.decided(opened.sequence_id, 2, [1000] * 7_000, finish=STOP))
        await until(lambda: transport.get_write_buffer_size() > 0)
        await running.until_idle()
        draining = asyncio.ensure_future(running.gateway.drain())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(draining), 0.1)
        async with asyncio.timeout(PATIENCE_S):
            while await loop.sock_recv(client, 1 << 16):
                pass
            await draining


async def test_what_a_whole_answer_may_hold_is_counted_in_bytes(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_writer, "MAX_ANSWER_BYTES", 1000)
    running = await start_api()
    # As JSON, the second one has six bytes for each character.
    for text, status in (("a" * 300, 200), ("日" * 300, 400)):
        verifier.play(lambda opened, text=text: [*texts(text), 0])  # type: ignore[misc]
        fields = {"stream": False, "max_tokens": 2000}
        answer = await post(running, "/v1/completions", body(**fields))
        assert answer.status == status, answer.body


def send_long_output(verifier: ScriptedVerifier, sequence_id: str, *, finish: int) -> None:
    """More than the buffers of both sockets hold."""
    step = 20_000
    for first in range(0, UNREAD_TOKENS, step):
        is_last = first + step == UNREAD_TOKENS
        verifier.send(
            verifier.decided(sequence_id, 2 + first, [1999] * step, finish=finish if is_last else 0)
        )


async def test_a_client_that_pipelines_gets_its_answers_in_order(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    verifier.play(lambda opened: [*texts(f"after {opened.token_ids[0]}"), 0])
    running = await start_api()
    first = request_bytes(
        "/v1/completions", body(prompt=[7], stream=False), connection="keep-alive"
    )
    second = request_bytes("/v1/completions", body(prompt=[8], stream=False))
    answer = await exchange(running, first + second)
    assert answer.body.index("after 7") < answer.body.index("after 8")
    await until(running.is_idle)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_whose_answer_cannot_be_written_counts_as_an_error(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
) -> None:
    read = answer_writer.AnswerWriter._read
    num_read = 0

    async def fail_at_the_second(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            raise RuntimeError("a bug")
        return await read(*args)

    monkeypatch.setattr(answer_writer.AnswerWriter, "_read", fail_at_the_second)
    verifier.play(lambda opened: [*texts("one two three"), 0])
    running = await start_api(stream_interval_s=0)
    answer = await post(running, "/v1/completions", body(stream=is_stream))
    assert answer.status == (200 if is_stream else 500)
    await running.until_idle()
    assert running.sample("tandem_request_errors_total", code="INTERNAL") == 1
    [entry] = [each for each in running.log if each["event"] == "request_ended"]
    assert entry["status"] == "INTERNAL"
