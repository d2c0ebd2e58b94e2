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
