"""OpenAI's parameters reach the verifier; what is wrong or not supported is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.v1 import sampling_pb2, verifier_pb2
from tests.gateway.clients import write_clients
from tests.gateway.openai.clients import (
    connection,
    get,
    post,
    read_answer,
    request_bytes,
)
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

USER = [{"role": "user", "content": "hi"}]
MUST_CALL = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
}


async def opened_by(
    start_api: StartApi, verifier: ScriptedVerifier, path: str, body: dict[str, Any]
) -> verifier_pb2.Open:
    """What the verifier is told of a request."""
    verifier.play(lambda opened: [5, 0])
    running = await start_api(drafters=["127.0.0.1:1"])
    answer = await post(running, path, {"model": "scripted", **body})
    assert answer.status == 200, answer.body
    opened: verifier_pb2.Open = await verifier.nth("open", 0)
    return opened


async def test_what_is_no_parameter_of_sampling_or_drafts_arrives_too(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 9,
        "logprobs": None,
        "seed": -1,
        "stop_token_ids": [77],
        "ignore_eos": True,
        "priority": 3,
        "user": "u",
        "n": 1,
    }
    opened = await opened_by(start_api, verifier, "/v1/completions", body)
    assert opened.max_new_tokens == 9
    assert opened.sampling.seed == 2**64 - 1
    assert not opened.sampling.HasField("logprobs")
    assert list(opened.stop_token_ids) == [77]
    assert opened.ignore_eos
    assert opened.priority == 3


async def test_logprobs_are_those_of_the_models_own_logits(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    running = await start_api()
    body = {"model": "scripted", "prompt": [1], "logprobs": 3, "temperature": 0}
    async with connection(running) as (_, writer):
        writer.write(request_bytes("/v1/completions", body))
        opened = await verifier.nth("open", 0)
    assert opened.sampling.logprobs == 3
    assert opened.sampling.logprobs_mode == sampling_pb2.LOGPROBS_MODE_RAW


REFUSED: list[tuple[str, Any, str]] = [
    ("best_of", 2, "unsupported_parameter"),
    ("suffix", "end", "unsupported_parameter"),
    ("store", True, "unsupported_parameter"),
    ("bogus", 1, "unknown_parameter"),
    ("n", 0, "invalid_value"),
    ("n", 17, "invalid_value"),
    ("max_tokens", 0, "invalid_value"),
    ("temperature", "1", "invalid_value"),
    ("logprobs", 21, "invalid_value"),
    ("logit_bias", {"2048": 1}, "invalid_value"),
    ("prompt", [2048], "invalid_value"),
    ("prompt", [5] * 2048, "context_length_exceeded"),
    ("prompt", "", "invalid_value"),
    ("prompt", [], "invalid_value"),
    ("prompt", 5, "invalid_value"),
    ("prompt", [1, "a"], "invalid_value"),
    ("seed", True, "invalid_value"),
    ("stop", ["x"] * 17, "invalid_value"),
    ("stop", "é" * 129, "invalid_value"),
    ("user", "é" * 129, "invalid_value"),
    ("stream_options", {"include_usage": True}, "invalid_value"),
    ("speculation", {"tree_width": 2}, "unknown_parameter"),
    ("num_beams", 2, "unknown_parameter"),
    ("adapter_id", "a", "unknown_parameter"),
    ("speculation", {"pool": "é" * 65}, "invalid_value"),
    ("speculation", {"bogus": 1}, "unknown_parameter"),
    ("structured_outputs", {}, "invalid_value"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "invalid_value"),
    ("structured_outputs", {"json": {"const": "x" * (1 << 20)}}, "invalid_value"),
]


async def test_a_wrong_parameter_is_named(start_api: StartApi) -> None:
    running = await start_api()
    for name, value, code in REFUSED:
        body = {"model": "scripted", "prompt": "abc", name: value}
        answer = await post(running, "/v1/completions", body)
        shown = f"{name}={value!r:.20}"
        assert answer.status == 400, shown
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"].split(".")[0] == name
        assert answer.error["code"] == code, shown
        assert answer.error["message"]


async def test_a_refusal_quotes_no_more_than_is_read(start_api: StartApi) -> None:
    running = await start_api()
    user: dict[str, Any] = {"model": "scripted", "messages": USER}
    for fields in ({"x" * 100_000: 1}, {"response_format": {"type": "x" * 100_000}}):
        answer = await post(running, "/v1/chat/completions", {**user, **fields})
        assert answer.status == 400
        assert len(answer.body) < 3000


CHAT_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prediction": {"type": "content", "content": "ab " * 9000}}, "prediction", "invalid_value"),
    ({"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"modalities": ["audio"]}, "modalities.0", "unsupported_parameter"),
    # The template reads no such variable; and no template has this value.
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"reasoning_effort": "some"}, "reasoning_effort", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
        "messages.0.audio",
        "unsupported_parameter",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "x" * 9000}]},
        "messages",
        "context_length_exceeded",
    ),
    (
        {"messages": [{"role": "user", "content": "x " * 500_000}]},
        "messages",
        "context_length_exceeded",
    ),
]


async def test_a_wrong_parameter_of_a_chat_is_named(start_api: StartApi) -> None:
    running = await start_api(max_prompt_tokens=1000)
    for fields, param, code in CHAT_REFUSED:
        body = {"model": "scripted", "messages": USER, **fields}
        answer = await post(running, "/v1/chat/completions", body)
        assert answer.status == 400, answer.body
        assert (answer.error["param"], answer.error["code"]) == (param, code)
        # By which clients that see no code know that they may shorten a conversation.
        is_too_long = code == "context_length_exceeded"
        assert answer.error["message"].startswith("the prompt is too long: ") == is_too_long


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"x": 1}', '{"x": 1}'),
        # As an answer may hold them that was cut, or that is not quite JSON.
        ('{"x": ', '"{\\"x\\": "'),
        ("[" * 1_500, '"' + "[" * 1_500 + '"'),
        ('{"x": 1e999}', '"{\\"x\\": 1e999}"'),
        ('{"x": "\\ud800"}', '"{\\"x\\": \\"\\\\ud800\\"}"'),
    ],
    ids=["sound", "cut", "deep", "too large", "half a surrogate pair"],
)
async def test_the_chat_template_makes_the_prompt(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Any, arguments: str, shown: str
) -> None:
    opened = await opened_by(
        start_api,
        verifier,
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    # LiteLLM sends this back with each answer.
                    "provider_specific_fields": {"refusal": None},
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": arguments},
                        }
                    ],
                },
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"shout": True},
        },
    )
    expected = (
        "[system]be brief[user]a\nb"
        f'[assistant]({{"name": "f", "arguments": {shown}}})[tool]2'
        '[{"type": "function", "function": {"name": "f"}}]![assistant]'
    )
    assert list(opened.token_ids) == texts(expected)


@pytest.mark.parametrize(
    "content", ["ab cd", [{"type": "text", "text": "ab"}, {"type": "text", "text": " cd"}]]
)
async def test_a_prediction_reaches_the_verifier_as_tokens(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Any, content: Any
) -> None:
    prediction = {"type": "content", "content": content}
    opened = await opened_by(
        start_api, verifier, "/v1/chat/completions", {"messages": USER, "prediction": prediction}
    )
    assert list(opened.predicted_token_ids) == texts("ab cd")


async def test_usage_counts_the_drafts_of_an_answer_with_a_prediction(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_api()
    body = {"model": "scripted", "messages": USER}
    for fields, is_counted in (
        ({}, False),
        ({"prediction": {"type": "content", "content": "x"}}, True),
    ):
        answer = await post(running, "/v1/chat/completions", {**body, **fields})
        details = json.loads(answer.body)["usage"]["completion_tokens_details"]
        assert ("accepted_prediction_tokens" in details) == is_counted
        assert ("rejected_prediction_tokens" in details) == is_counted


async def test_an_unknown_model_is_not_found(start_api: StartApi) -> None:
    running = await start_api()
    for path, prompt in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": USER}),
        ("chat/completions", {"messages": USER, **MUST_CALL}),
    ):
        answer = await post(running, f"/v1/{path}", {"model": "other", **prompt})
        assert (answer.status, answer.error["param"]) == (404, "model")
        assert answer.error["code"] == "model_not_found"
    assert (await get(running, "/v1/models/other")).status == 404


async def test_a_body_may_say_that_it_is_not_encoded_and_begin_with_a_byte_order_mark(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [300])
    running = await start_api()
    body = b'\xef\xbb\xbf{"model": "scripted", "prompt": [1]}'
    answer = await post(running, "/v1/completions", body, content_encoding=" Identity")
    assert answer.status == 200, answer.body
    twice = await post(running, "/v1/completions", body[:3] + body)
    assert (twice.status, twice.error["code"]) == (400, "invalid_json")


async def test_bodies_that_are_no_requests_are_refused(start_api: StartApi) -> None:
    running = await start_api()
    for body in (b"", b"{", b"[]", b'{"model": "\\ud800", "prompt": "a"}', b"\xff", b"[" * 1_500):
        answer = await post(running, "/v1/completions", body)
        assert answer.status == 400, body[:20]
        assert answer.error["type"] == "invalid_request_error"
    invalid = await post(running, "/v1/completions", b"{")
    assert invalid.error["message"].startswith("the body is not valid JSON: EOF while parsing")
    for headers in ({"content_type": "text/plain"}, {"content_encoding": "gzip"}):
        typed = await post(running, "/v1/completions", b"{}", **headers)
        assert (typed.status, typed.error["code"]) == (415, "unsupported_media_type")
        [name] = headers
        assert name.replace("_", "-") in typed.error["message"]
    missing = await post(running, "/v1/completions", {"prompt": "a"})
    assert (missing.error["param"], missing.error["code"]) == (
        "model",
        "missing_required_parameter",
    )


async def test_unknown_paths_and_methods_have_errors_in_openais_form(start_api: StartApi) -> None:
    running = await start_api()
    unknown = await get(running, "/v1/embeddings")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    method = await get(running, "/v1/completions")
    assert (method.status, method.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"content": b"{"}, 400, "INVALID_ARGUMENT"),
        ({"content": b'{"model": "scripted", "prompt": "x", "n": 99}'}, 400, "INVALID_ARGUMENT"),
        (
            {"content": b'{"model": "scripted", "prompt": "x", "best_of": 2}'},
            400,
            "UNIMPLEMENTED",
        ),
        ({"content": b"{}", "content_type": "text/plain"}, 415, "INVALID_ARGUMENT"),
        ({"content": b"{}", "authorization": "Bearer wrong"}, 401, "UNAUTHENTICATED"),
    ],
)
async def test_what_is_refused_before_it_runs_is_counted_and_logged_as_over_grpc(
    start_api: StartApi, tmp_path: Path, sent: dict[str, Any], status: int, code: str
) -> None:
    clients = write_clients(tmp_path / "clients.yaml", a={"tokens": ["secret"]})
    running = await start_api(clients=clients)
    headers = {"authorization": "Bearer secret", "x_request_id": "mine", **sent}
    answer = await post(running, "/v1/completions", headers.pop("content"), **headers)
    assert answer.status == status
    assert running.sample("tandem_requests_received_total") == 1
    assert running.sample("tandem_request_errors_total", code=code) == 1
    assert running.sample("tandem_request_errors_total") == 1
    [line] = [entry for entry in running.log if entry["event"] == "request_ended"]
    tenant = "" if status == 401 else "a"
    assert (line["status"], line["request_id"], line["tenant"]) == (code, "mine", tenant)
    # Those that ask for models are no requests for output.
    await get(running, "/v1/models", authorization="Bearer wrong")
    assert running.sample("tandem_requests_received_total") == 1


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": None}},
            "response_format.json_schema.schema",
        ),
        ({"type": "json_object", "more": 1}, "response_format.more"),
        ({"type": "else"}, "response_format"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 70_000}}},
            "response_format",
        ),
    ],
    ids=["no schema", "null", "more", "another type", "too large"],
)
async def test_a_wrong_format_is_named_by_its_place_in_the_request(
    start_api: StartApi, given: dict[str, Any], param: str
) -> None:
    running = await start_api()
    body = {"model": "scripted", "messages": USER, "response_format": given}
    answer = await post(running, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields", "field", "param"),
    [
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"choice": ["a"]}},
            "sampling.structured_output.choices.values[3]",
            "structured_outputs",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "response_format": {"type": "json_object"}},
            "sampling.structured_output",
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "logprobs": True, "top_logprobs": 5},
            "sampling.logprobs",
            "top_logprobs",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "logprobs": True},
            "sampling.logprobs",
            "logprobs",
        ),
    ],
)
async def test_what_a_verifier_refuses_is_named_as_the_client_named_it(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    path: str,
    fields: dict[str, Any],
    field: str,
    param: str,
) -> None:
    running = await start_api()
    async with connection(running) as (reader, writer):
        writer.write(request_bytes(path, {"model": "scripted", **fields}))
        opened = await verifier.nth("open", 0)
        verifier.send(verifier.rejected(opened.sequence_id, code=3, message="no", field=field))
        answer = await read_answer(reader)
    assert answer.error["param"] == param


async def test_without_a_verifier_every_request_is_to_come_again(start_api: StartApi) -> None:
    running = await start_api(verifiers=["127.0.0.1:1"], is_serving=False, connect_timeout_s=0.05)
    for path, fields in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": USER}),
        ("chat/completions", {"messages": USER, **MUST_CALL}),
    ):
        answer = await post(running, f"/v1/{path}", {"model": "scripted", **fields})
        assert answer.status == 503, fields
    assert running.sample("tandem_requests_received_total") == 3
    assert running.sample("tandem_request_errors_total", code="UNAVAILABLE") == 3
    assert running.sample("tandem_requests_shed_total", reason="no_verifier") == 3
