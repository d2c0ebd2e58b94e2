"""JSON schemas as verifiers get them."""

import json
from typing import Any

import pytest

from gateway.api.openai.reading import grammars
from tandem.v1 import sampling_pb2
from tests.gateway.openai.clients import post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

ANY = {"propertyNames": {"type": "string"}}


@pytest.mark.parametrize("given", [ANY, {"a": [1, None, "é"]}, True])
def test_a_schema_is_written_as_it_is_in_as_few_bytes_as_it_takes(given: Any) -> None:
    written = grammars.written(given)
    assert json.loads(written) == given
    assert " " not in written
    assert len(written.encode()) <= len(json.dumps(given, ensure_ascii=False).encode())


async def test_a_schema_may_be_as_deep_as_a_body(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [300])
    running = await start_api()
    # What a body may hold within one another: 199 objects and lists.
    deep = '{"anyOf": [' * 98 + json.dumps(ANY) + "]}" * 98
    head = '{"model": "scripted", "prompt": "x", "structured_outputs": {"json": '
    answer = await post(running, "/v1/completions", (head + deep + "}}").encode())
    assert answer.status == 200, answer.body
    grammar = (await verifier.nth("open", 0)).sampling.structured_output
    assert isinstance(grammar, sampling_pb2.StructuredOutput)
    assert json.loads(grammar.json_schema) == json.loads(deep)


USER = [{"role": "user", "content": "hi"}]
FORMATS = {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}
STRUCTURED: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"regex": "a"},
    {"choice": ["a"]},
    {"grammar": 'start: "a"'},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}
FLAT_TOOLS = [{"type": "function", "name": "f"}]

TWO_FORMATS: list[tuple[str, dict[str, Any], str]] = [
    *(
        (path, {**prompt, "response_format": form, "structured_outputs": other}, "response_format")
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": USER}),
        )
        for form in FORMATS
        for other in STRUCTURED
    ),
    *(
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": TOOLS, "tool_choice": choice, **other},
            "tool_choice",
        )
        for choice in ("required", NAMED)
        for other in (
            *({"response_format": form} for form in FORMATS),
            *({"structured_outputs": form} for form in STRUCTURED),
        )
    ),
    *(
        (
            "/v1/responses",
            {"input": "x", "tools": FLAT_TOOLS, "tool_choice": choice, "text": {"format": form}},
            "tool_choice",
        )
        for choice in ("required", FLAT_TOOLS[0])
        for form in ({"type": "json_object"}, {"type": "json_schema", "schema": {}})
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), TWO_FORMATS)
async def test_two_formats_at_once_are_refused_by_name(
    start_api: StartApi, path: str, fields: dict[str, Any], param: str
) -> None:
    running = await start_api(tool_call_parser="hermes")
    answer = await post(running, path, {"model": "scripted", **fields})
    assert answer.status == 400, answer.body
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("other", STRUCTURED)
async def test_free_text_is_no_second_format(
    start_api: StartApi, verifier: ScriptedVerifier, path: str, other: dict[str, Any]
) -> None:
    verifier.play(lambda opened: [300])
    running = await start_api()
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": USER}
    fields = {"response_format": {"type": "text"}, "structured_outputs": other}
    answer = await post(running, path, {"model": "scripted", **prompt, **fields})
    assert answer.status == 200, answer.body
    assert (await verifier.nth("open", 0)).sampling.HasField("structured_output")


@pytest.mark.parametrize("form", FORMATS)
async def test_a_completion_follows_its_response_format_as_a_chat_does(
    start_api: StartApi, verifier: ScriptedVerifier, form: dict[str, Any]
) -> None:
    verifier.play(lambda opened: [300])
    running = await start_api()
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": USER}),
    ):
        body = {"model": "scripted", **prompt, "response_format": form}
        assert (await post(running, path, body)).status == 200
    opened = [await verifier.nth("open", index) for index in (0, 1)]
    of_completion, of_chat = (each.sampling.structured_output for each in opened)
    assert of_completion == of_chat
    assert of_completion.json_schema
