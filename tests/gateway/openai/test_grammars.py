"""JSON schemas as verifiers get them."""

import json
from typing import Any

import pytest

from gateway.api.openai import grammars
from tandem.v1 import sampling_pb2
from tests.gateway.openai.clients import post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

ANY = {"propertyNames": {"type": "string"}}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"propertyNames": True, "type": "object"}, {"type": "object"}),
        ({"propertyNames": {}}, {}),
        ({"propertyNames": {"type": "string", "description": "an id"}}, {}),
        ({"anyOf": [{"items": ANY}], "not": ANY}, {"anyOf": [{"items": {}}], "not": {}}),
        ({"$defs": {"a": ANY}}, {"$defs": {"a": {}}}),
        # Names of properties are no keywords.
        ({"properties": {"propertyNames": {}, "a": ANY}},
         {"properties": {"propertyNames": {}, "a": {}}}),
        ({"properties": {"properties": {"properties": {"propertyNames": True}}}},
         {"properties": {"properties": {"properties": {"propertyNames": True}}}}),
    ],
)  # fmt: skip
def test_names_that_may_be_any_are_left_out(given: Any, written: Any) -> None:
    before = json.dumps(given)
    assert json.loads(grammars.written(given)) == written
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "given",
    [
        {"propertyNames": False},
        {"propertyNames": 1},
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"type": "string", "minLength": 1}},
        {"propertyNames": {"type": ["string"], "enum": ["a"]}},
        *({key: ANY} for key in ("const", "default")),
        *({key: [ANY]} for key in ("enum", "examples")),
    ],
)
def test_names_that_may_not_be_any_and_values_stay(given: Any) -> None:
    assert json.loads(grammars.written(given)) == given


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
    assert "propertyNames" not in grammar.json_schema
