"""No body, however large and whatever it holds, blocks the gateway's event loop.

What counts is the work of the gateway alone: clients and verifier are threads of their own.
"""

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path

import h11
import pytest

from gateway.api.http_connection import BrokenRequestError, RequestParser
from gateway.api.openai.reading import requests
from gateway.api.openai.reading.json_size import MAX_JSON_SIZE, json_size
from servicekit.channels.limits import MAX_MESSAGE_BYTES
from tests.gateway.running_gateway import StartGateway
from tests.gateway.threaded_verifier import ThreadedVerifier, threaded_verifiers
from tests.work import MAX_WORK, Weights, counted

pytestmark = pytest.mark.stand_in

Fill = Callable[[int], str]

COMPLETION = '{"model": "threaded", "prompt": "x", "max_tokens": 1, '
CHAT = '{"model": "threaded", "max_tokens": 1, '
USER = '"messages": [{"role": "user", "content": "hi"}], '
RESPONSES = "/v1/responses"
RESPONSE = '{"model": "threaded", "max_output_tokens": 1, '
CALLS = (
    '"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [%s]}]}'
)

# What is parsed in one call.
WEIGHTS: Weights = {
    (requests, "parse"): lambda model, body: json_size(body, numbers_per_string=10) // 2
}


def call(arguments: str) -> str:
    function = {"name": "f", "arguments": arguments}
    return json.dumps({"id": "c", "type": "function", "function": function})


# What comes before the elements, an element by its index, and what comes after them.
BODIES: dict[str, tuple[str, Fill, str]] = {
    "unknown fields": (COMPLETION, lambda i: f'"f{i}": 1', "}"),
    "biases of no tokens": (COMPLETION + '"logit_bias": {', lambda i: f'"a{i}": 1', "}}"),
    "metadata": (COMPLETION + '"metadata": {', lambda i: f'"{i}": 1', "}}"),
    "a schema": (
        COMPLETION + '"structured_outputs": {"json": {',
        lambda i: f'"f{i}": {{}}',
        "}}}",
    ),
    "tokens": (CHAT + '"prompt": [', lambda i: str(i % 2000), "]}"),
    "empty messages": (CHAT + '"messages": [', lambda i: "{}", "]}"),
    "long messages": (
        CHAT + '"messages": [',
        lambda i: json.dumps({"role": "user", "content": '"{[\\' * 200}),
        "]}",
    ),
    "unknown fields of a message": (
        CHAT + '"messages": [{"role": "user", ',
        lambda i: f'"f{i}": 1',
        "}]}",
    ),
    "tools": (
        CHAT + USER + '"tools": [',
        lambda i: '{"type": "function", "function": {"name": "f"}}',
        "]}",
    ),
    "a tool": (
        CHAT
        + USER
        + '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", '
        '"parameters": {"properties": {',
        lambda i: f'"f{i}": {{}}',
        "}}}}]}",
    ),
    "variables": (
        CHAT + USER + '"chat_template_kwargs": {"a": [',
        lambda i: '{"a": [0, 0, 0]}',
        "]}}",
    ),
    "items": (RESPONSE + '"input": [', lambda i: '{"role": "user", "content": ""}', "]}"),
    "long earlier calls": (
        RESPONSE + '"input": [',
        lambda i: json.dumps(
            {
                "type": "function_call",
                "call_id": "",
                "name": "f",
                "arguments": json.dumps({"a": "x" * 1500}),
            }
        ),
        "]}",
    ),
    "a format": (
        CHAT + USER + '"response_format": {"type": "json_object", ',
        lambda i: f'"f{i}": 1',
        "}}",
    ),
}


def filled(before: str, element: Fill, after: str, *, max_size: int) -> bytes:
    """A body with as many elements as there is room for."""
    count = count_of(element, max_size, numbers_per_string=10)
    count = min(count, (MAX_MESSAGE_BYTES - 1000) // (len(element(10**6)) + 2))
    return (before + ", ".join(map(element, range(count))) + after).encode()


def count_of(element: Fill, max_size: int, *, numbers_per_string: int) -> int:
    """How many elements have this size, and what is around them."""
    some = "".join(f"{element(index)}, " for index in range(2400)).encode()
    size = json_size(some, numbers_per_string=numbers_per_string)
    return (max_size - 64) * 2400 // size


def with_calls(element: str, *, max_size: int) -> bytes:
    """A body with two calls of tools, whose arguments are as large as there is room for."""
    count = count_of(lambda _: element, max_size // 2, numbers_per_string=2)
    count = min(count, 2_000_000 // (len(json.dumps(element)) + 2))
    arguments = "[" + ", ".join([element] * count) + "]"
    return (CHAT + CALLS % ", ".join([call(arguments)] * 2)).encode()


def post(address: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    path = "/v1/completions"
    for conversation, other in ((b'"messages"', "/v1/chat/completions"), (b'"input"', RESPONSES)):
        if conversation in body[:1000]:
            path = other
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    read = answer.status, answer.read()
    connection.close()
    return read


@pytest.mark.parametrize("is_refused", [False, True], ids=["parsed", "refused"])
async def test_no_body_blocks_the_loop(
    start_gateway: StartGateway, chat_folder: Path, is_refused: bool
) -> None:
    max_size = 1 << 30 if is_refused else MAX_JSON_SIZE
    bodies = {kind: filled(*parts, max_size=max_size) for kind, parts in BODIES.items()}
    bodies |= {
        f"arguments of {element}": with_calls(element, max_size=max_size)
        for element in ("[]", '{"a": ""}', "1.5", '"\\\\"')
    }
    with threaded_verifiers(ThreadedVerifier(), 1) as addresses:
        running = await start_gateway(
            verifiers=addresses,
            tokenizer=chat_folder,
            http_listen="127.0.0.1:0",
            draft_wait="never",
            tool_call_parser="hermes",
        )
        address = running.gateway.http_address
        assert address is not None
        await asyncio.to_thread(post, address, b"{}")
        for kind, body in bodies.items():
            with counted(weights=WEIGHTS) as turns:
                status, answered = await asyncio.to_thread(post, address, body)
                await running.until_idle()
            is_too_much = is_refused and not kind.startswith("long")
            assert status in ((413,) if is_too_much else (200, 400)), (kind, answered)
            assert 0 < turns.most < MAX_WORK, kind
        await running.gateway.stop()


def post_in_chunks(address: str, path: str, num_chunks: int) -> bytes:
    """Sends a body of one byte per chunk, and reads until the connection ends."""
    host, _, port = address.rpartition(":")
    answered = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sent = head.encode() + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * num_chunks
        # What it has not read when it closes the connection resets it.
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answered += part
    return answered


@pytest.mark.parametrize(
    ("framing", "head", "tail", "is_refused"),
    [
        ("content-length: 300000", b"", b"", False),
        ("transfer-encoding: chunked", b"64\r\n", b"\r\n", True),
    ],
)
def test_small_pieces_of_a_body_are_refused_only_if_they_are_chunks(
    framing: str, head: bytes, tail: bytes, is_refused: bool
) -> None:
    """Over a slow line, a body comes in small pieces whatever its client does."""
    parser = RequestParser(1 << 15)
    parser.receive_data(f"POST / HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
    assert isinstance(parser.next_event(), h11.Request)
    refusals = pytest.raises(BrokenRequestError, match="chunks")
    with refusals if is_refused else contextlib.nullcontext():
        for _ in range(2_000):
            parser.receive_data(head + b"x" * 100 + tail)
            while parser.next_event() is not h11.NEED_DATA:
                pass


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_a_body_in_tiny_chunks_is_refused_before_it_blocks_the_loop(
    start_gateway: StartGateway, path: str
) -> None:
    with threaded_verifiers(ThreadedVerifier(), 1) as addresses:
        running = await start_gateway(verifiers=addresses, http_listen="127.0.0.1:0")
        address = running.gateway.http_address
        assert address is not None
        await asyncio.to_thread(post, address, b"{}")
        with counted() as turns:
            await asyncio.to_thread(post_in_chunks, address, path, 500_000)
        assert 0 < turns.most < MAX_WORK
        few = await asyncio.to_thread(post_in_chunks, address, path, 1_030)
        # One that nobody reads may be answered before it is found to be malformed.
        assert few[:13] in (b"HTTP/1.1 400 ", *([b"HTTP/1.1 404 "] if path == "/nothing" else []))
        if few.startswith(b"HTTP/1.1 400 "):
            error = json.loads(few.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "invalid_http"
            assert error["message"].startswith("the body's chunks are too small: beyond 1024, ")
        await running.gateway.stop()
