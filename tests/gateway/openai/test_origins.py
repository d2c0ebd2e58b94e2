"""Pages of other origins: browsers ask first, and read answers only with the headers of CORS."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients import write_clients
from tests.gateway.openai.clients import (
    Answer,
    connection,
    exchange,
    get,
    post,
    read_answer,
    request_bytes,
)
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

ORIGIN, OTHER = "https://chat.example", "https://other.example"
BODY: dict[str, Any] = {"model": "scripted", "prompt": [1, 2]}
# As OpenAI's client in a browser, in part.
ASKED = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"


async def ask_first(running: RunningGateway, origin: str, **headers: str) -> Answer:
    """What a browser sends before a POST of JSON: no key, no body."""
    return await exchange(
        running,
        request_bytes(
            "/v1/chat/completions",
            method="OPTIONS",
            origin=origin,
            access_control_request_method="POST",
            access_control_request_headers=ASKED,
            **headers,
        ),
    )


def cors_headers(answer: Answer) -> dict[str, str]:
    return {
        name.removeprefix("access-control-"): value
        for name, value in answer.headers.items()
        if name.startswith("access-control-")
    }


def readable_for(origin: str) -> dict[str, str]:
    return {
        "allow-origin": origin,
        "expose-headers": "x-request-id, retry-after, retry-after-ms",
    }


@pytest.mark.parametrize(
    ("allowed", "allow_origin"), [([OTHER, ORIGIN], ORIGIN), (["*"], "*")], ids=["listed", "all"]
)
async def test_a_browser_may_ask_without_a_key_and_nothing_is_counted(
    start_api: StartApi, tmp_path: Path, allowed: list[str], allow_origin: str
) -> None:
    clients = write_clients(tmp_path / "clients.yaml", acme={"tokens": ["secret"]})
    running = await start_api(clients=clients, http_allowed_origins=allowed)
    answer = await ask_first(running, ORIGIN)
    assert answer.status == 200
    assert cors_headers(answer) == {
        "allow-origin": allow_origin,
        "allow-methods": "GET, POST",
        "allow-headers": ASKED,
        "max-age": "600",
    }
    local = await ask_first(running, ORIGIN, access_control_request_private_network="true")
    assert (local.status, cors_headers(local)["allow-private-network"]) == (200, "true")
    assert running.sample("tandem_requests_received_total") == 0
    assert running.sample("tandem_request_errors_total") == 0


@pytest.mark.parametrize("origin", [OTHER, "null", f"{ORIGIN}.evil.example", "http://chat.example"])
async def test_other_origins_may_not_read(start_api: StartApi, origin: str) -> None:
    running = await start_api(http_allowed_origins=[ORIGIN])
    for answer in (
        await ask_first(running, origin),
        await get(running, "/v1/models", origin=origin),
    ):
        assert "allow-origin" not in cors_headers(answer)
    assert running.sample("tandem_request_errors_total") == 0


@pytest.mark.parametrize(
    ("allowed", "allow_origin"), [([ORIGIN], ORIGIN), (["*"], "*")], ids=["listed", "all"]
)
async def test_answers_and_errors_can_be_read(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    tmp_path: Path,
    allowed: list[str],
    allow_origin: str,
) -> None:
    clients = write_clients(tmp_path / "clients.yaml", acme={"tokens": ["secret"]})
    running = await start_api(
        clients=clients, http_allowed_origins=allowed, max_concurrent_requests=2
    )
    fields = {"origin": ORIGIN, "authorization": "Bearer secret"}
    path = "/v1/completions"
    async with connection(running) as (reader, writer):
        writer.write(request_bytes(path, BODY, **fields))
        opened = await verifier.nth("open", 0)
        answers = {
            401: await post(running, path, BODY, origin=ORIGIN),
            404: await get(running, "/v1/nothing", **fields),
            405: await get(running, path, **fields),
            413: await exchange(
                running, request_bytes(path, b"", **fields, content_length="5000000")
            ),
            415: await post(running, path, BODY, **fields, content_type="text/plain"),
            429: await post(running, path, BODY, **fields),
        }
        verifier.send(verifier.decided(opened.sequence_id, 2, [5], finish=STOP))
        answers[200] = await read_answer(reader)
    running.gateway._openai.close()
    await running.gateway.frontend.drain()
    answers[503] = await post(running, path, BODY, **fields)
    for status, answer in answers.items():
        assert answer.status == status
        assert cors_headers(answer) == readable_for(allow_origin), status
        assert "x-request-id" in answer.headers
        assert allow_origin == "*" or answer.headers["vary"] == "Origin"
    assert "retry-after" in answers[429].headers
