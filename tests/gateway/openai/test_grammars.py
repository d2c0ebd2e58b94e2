"""JSON schemas as verifiers get them."""

import json
from typing import Any

import pytest

from gateway.api.openai.reading import grammars
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


async def test_two_formats_at_once_are_refused_by_name(start_api: StartApi) -> None:
    running = await start_api(tool_call_parser="hermes")
    for path, fields, param in TWO_FORMATS:
        answer = await post(running, path, {"model": "scripted", **fields})
        assert answer.status == 400, fields
        assert (answer.error["param"], answer.error["code"]) == (param, "invalid_value"), fields


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
