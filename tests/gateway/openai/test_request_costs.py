"""What a request may cost before it is admitted, and what it keeps while its answer streams."""

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope

from gateway.api.connection import Connection
from gateway.api.openai import body as bodies
from gateway.api.openai.body import BodyReader
from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import schema
from gateway.api.openai.responses.schema import ResponsesRequest
from gateway.messages.request import Conversation, GenerateRequest
from gateway.text.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.gateway.clients import write_clients
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import connection, post, request_bytes
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import until
from tests.gateway.scripted_server import PATIENCE_S
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

LONG = "one two three four " * 4_000

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "logprobs": 1}),
    ("/v1/completions", {"prompt": LONG, "logprobs": 1, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ("/v1/responses", {"input": LONG}),
]


class Calls:
    """The threads in which texts were rendered and encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        encode, render = Tokenizer.encode, ChatTemplate.render

        def note() -> None:
            self.threads.append(threading.current_thread().name)

        def counted_encode(tokenizer: Tokenizer, text: str, **fields: Any) -> list[int]:
            note()
            return encode(tokenizer, text, **fields)

        def counted_render(template: ChatTemplate, messages: Any, **fields: Any) -> str:
            note()
            return render(template, messages, **fields)

        monkeypatch.setattr(Tokenizer, "encode", counted_encode)
        monkeypatch.setattr(ChatTemplate, "render", counted_render)


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
async def test_long_texts_are_rendered_and_encoded_on_the_tokenizers_threads_after_admission(
    start_api: StartApi,
    start_verifier: StartVerifier,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
) -> None:
    verifier = await start_verifier(max_model_len=1 << 17)
    running = await start_api(verifiers=[verifier.address], max_concurrent_requests=1)
    calls = Calls(monkeypatch)
    async with connection(running) as (_, writer):
        body = {"model": "scripted", "prompt": [1], "max_tokens": 9}
        writer.write(request_bytes("/v1/completions", body))
        await verifier.nth("open", 0)
        refused = await post(running, path, {"model": "scripted", **fields})
        assert refused.status == 429
        assert calls.threads == [], "a request that is not admitted costs no work"
    await running.until_idle()
    async with connection(running) as (_, writer):
        writer.write(request_bytes(path, {"model": "scripted", **fields}))
        await verifier.nth("open", 1)
    assert calls.threads
    assert all(name.startswith("tokenizer-") for name in calls.threads), calls.threads
    await running.until_idle()


async def test_a_conversation_of_which_the_template_makes_too_much_is_refused_unencoded(
    start_api: StartApi, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ tools | tojson(indent=4) }}"
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    running = await start_api()
    calls = Calls(monkeypatch)
    # 40 KB, of which each number becomes a line of 700 bytes.
    nested = json.loads("[" * 170 + "0" + ",0" * 12_999 + "]" * 170)
    function = {"name": "f", "parameters": {"type": "object", "default": nested}}
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    answer = await post(running, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert answer.error["code"] == "context_length_exceeded"
    assert f"more than {MAX_RENDERED_CHARACTERS} characters" in answer.error["message"]
    assert len(calls.threads) == 1, "rendered, not encoded"


async def test_bodies_that_wait_to_be_parsed_count_among_those_that_are_there(
    start_api: StartApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MAX_RECEIVED_BYTES", 250_000)
    running = await start_api()
    api = running.gateway._openai
    body = json.dumps({"model": "scripted", "prompt": [5] * 50_000}).encode()
    connection = Connection(
        abort=lambda: None,
        is_gone=lambda: False,
        is_last=lambda: False,
        certificate_names=(),
    )

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def parse() -> schema.CompletionRequest:
        scope = {
            "headers": [(b"content-type", b"application/json")],
            "state": {"connection": connection},
        }
        return (await api._parse(schema.CompletionRequest, scope, receive, "tenant"))[0]

    async with api._long_bodies:
        first = asyncio.create_task(parse())
        await until(lambda: bool(api._long_bodies._waiters))
        with pytest.raises(ApiError, match=f"{len(body)} bytes of other requests are there"):
            await parse()
    assert running.sample("tandem_requests_shed_total", reason="bodies") == 1
    assert len((await first).prompt) == 50_000
    await parse()
    assert (api._bodies._num_bytes, api._bodies._num_bodies.total()) == (0, 0)


class CountedBody(bytes):
    """A body that counts how many of its kind were freed."""

    num_freed = 0

    def __del__(self) -> None:
        CountedBody.num_freed += 1


def requests_kept() -> list[object]:
    """All requests that anything keeps, parsed or not yet run."""
    kinds = (
        schema.CompletionRequest,
        schema.ChatCompletionRequest,
        ResponsesRequest,
        GenerateRequest,
        Conversation,
    )
    return [each for each in gc.get_objects() if type(each) in kinds]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_while_its_answer_streams_nothing_keeps_a_requests_body(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
) -> None:
    read = BodyReader.read

    @contextlib.asynccontextmanager
    async def read_counted(
        reader: BodyReader, scope: Scope, receive: Receive, tenant: str
    ) -> AsyncIterator[bytes]:
        async with read(reader, scope, receive, tenant) as body:
            yield CountedBody(body)

    monkeypatch.setattr(BodyReader, "read", read_counted)
    monkeypatch.setattr(CountedBody, "num_freed", 0)
    running = await start_api()
    async with connection(running) as (reader, writer):
        # Other tests may have left some; kept, so that their ids are not given again.
        before = requests_kept()
        known = set(map(id, before))
        body = {"model": "scripted", "stream": True, **fields}
        writer.write(request_bytes(path, body))
        opened = await verifier.nth("open", 0)
        verifier.send(verifier.decided(opened.sequence_id, len(opened.token_ids), [70]))
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"data: ")
        gc.collect()
        assert CountedBody.num_freed == 1
        assert not [each for each in requests_kept() if id(each) not in known]
    await running.until_idle()


@pytest.mark.parametrize(("prompts", "n"), [([[1], [2], [3]], 1), ([[1], [2]], 2)])
async def test_more_prompts_than_may_ever_be_continued_at_a_time_are_no_overload(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    tmp_path: Path,
    prompts: list[list[int]],
    n: int,
) -> None:
    verifier.play(lambda opened: [5, 0])
    clients = write_clients(
        tmp_path / "clients.yaml", small={"tokens": ["small"], "max_concurrent_requests": 2}
    )
    running = await start_api(clients=clients)
    headers = {"authorization": "Bearer small"}
    body = {"model": "scripted", "prompt": prompts, "n": n}
    answer = await post(running, "/v1/completions", body, **headers)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert f"{len(prompts) * n} choices are over the limit of 2" in answer.error["message"]
    assert not verifier.commands("open"), "a client that repeats it would load the verifiers"
    assert running.sample("tandem_request_errors_total", code="INVALID_ARGUMENT") == 1
    assert running.sample("tandem_requests_received_total") == 1
    body["prompt"], body["n"] = prompts[:2], 1
    assert (await post(running, "/v1/completions", body, **headers)).status == 200
