"""Tool calls over HTTP, with the official client."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.openai import answer_schema
from tandem.v1 import sampling_pb2
from tests.gateway.openai.clients import official_client, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

Texts = Callable[[str], list[int]]

PATH = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "$defs": {"city": {"type": "string"}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
USER: list[Any] = [{"role": "user", "content": "Weather in Graz?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time"}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": USER, "tools": TOOLS, **fields}


async def start(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, text: str, **options: Any
) -> RunningGateway:
    """A gateway whose model answers with a text."""
    verifier.play(lambda opened: [*texts(text), 0])
    return await start_api(**{"tool_call_parser": "hermes", **options})


async def test_calls_come_as_the_official_client_expects_them(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    running = await start(start_api, verifier, texts, f"I look.\n{CALL}\n{OTHER}")
    async with official_client(running) as client:
        whole = await client.chat.completions.create(model="scripted", messages=USER, tools=TOOLS)
        [choice] = whole.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls or []
        assert [call.type for call in calls] == ["function", "function"]
        stream = await client.chat.completions.create(
            model="scripted", messages=USER, tools=TOOLS, stream=True, n=2
        )
        streamed: list[list[Any]] = [[], []]
        contents, reasons = ["", ""], ["", ""]
        async for chunk in stream:
            for each in chunk.choices:
                streamed[each.index] += each.delta.tool_calls or []
                contents[each.index] += each.delta.content or ""
                reasons[each.index] += each.finish_reason or ""
    assert contents == ["I look."] * 2
    assert reasons == ["tool_calls"] * 2
    expected = [("weather", {"city": "Graz"}), ("time", {})]
    for found in (calls, *streamed):
        assert [(c.function.name, json.loads(c.function.arguments)) for c in found] == expected
    assert [[call.index for call in each] for each in streamed] == [[0, 1], [0, 1]]
    ids = [call.id for found in (calls, *streamed) for call in found]
    assert len(set(ids)) == len(ids)


async def test_an_answer_of_calls_alone_has_no_content(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    running = await start(start_api, verifier, texts, CALL)
    answer = await post(running, PATH, body(logprobs=False))
    whole = answer_schema.ChatCompletion.model_validate_json(answer.body)
    assert whole.choices[0].message.content is None
    stream = await post(running, PATH, body(stream=True))
    chunks = [answer_schema.ChatCompletionChunk.model_validate(each) for each in stream.events[:-1]]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"tool_choice": "none"}, {}),
        ({"tools": None}, {}),
        ({}, {"tool_call_parser": "none"}),
        ({}, {"tool_call_parser": "auto"}),
    ],
    ids=["none may be called", "there are none", "not parsed", "a template without calls"],
)
async def test_calls_stay_text_where_none_are_expected(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    fields: dict[str, Any],
    options: dict[str, Any],
) -> None:
    running = await start(start_api, verifier, texts, CALL, **options)
    answer = json.loads((await post(running, PATH, body(**fields))).body)
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_the_length_cuts_stays_text(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    running = await start(start_api, verifier, texts, CALL)
    answer = json.loads((await post(running, PATH, body(max_tokens=9))).body)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert CALL.startswith(choice["message"]["content"])


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
async def test_a_call_that_must_come_is_the_outputs_grammar(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    parser: str,
    tool_choice: Any,
    names: set[str],
) -> None:
    running = await start(start_api, verifier, texts, CALL, tool_call_parser=parser)
    answer = await post(running, PATH, body(tool_choice=tool_choice))
    assert answer.status == 200
    opened = await verifier.nth("open", 0)
    grammar = opened.sampling.structured_output
    assert isinstance(grammar, sampling_pb2.StructuredOutput)
    if parser == "hermes":
        schema = json.loads(grammar.lark.partition("%json")[2])
    else:
        schema = json.loads(grammar.json_schema)
    assert {each["properties"]["name"]["const"] for each in schema["anyOf"]} == names
    assert schema["$defs"] == PARAMETERS["$defs"], "references begin at the root"


CLASHING = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"$defs": {"a": {"const": name}}}},
    }
    for name in "fg"
]


@pytest.mark.parametrize(
    ("fields", "options", "param", "code"),
    [
        ({"tool_choice": "required", "tools": []}, {}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
            {},
            "tool_choice",
            "invalid_value",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            {},
            "tool_choice",
            "invalid_value",
        ),
        ({"tool_choice": "required", "tools": CLASHING}, {}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": "required"},
            {"tool_call_parser": "auto"},
            "tool_choice",
            "unsupported_parameter",
        ),
        ({"tool_choice": "sometimes"}, {}, "tool_choice", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            {},
            "tools.0.function",
            "invalid_value",
        ),
        ({"parallel_tool_calls": False}, {}, "parallel_tool_calls", "unsupported_parameter"),
    ],
)
async def test_a_choice_that_cannot_be_kept_is_refused_by_name(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    fields: dict[str, Any],
    options: dict[str, Any],
    param: str,
    code: str,
) -> None:
    running = await start(start_api, verifier, texts, CALL, **options)
    answer = await post(running, PATH, body(**fields))
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)


async def test_a_verifier_without_structured_output_refuses_the_choice(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    running = await start_api(tool_call_parser="hermes")
    posting = asyncio.ensure_future(post(running, PATH, body(tool_choice="required")))
    opened = await verifier.nth("open", 0)
    verifier.send(
        verifier.rejected(
            opened.sequence_id,
            code=12,
            message="not allowed",
            field="sampling.structured_output.lark",
        )
    )
    answer = await posting
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    assert answer.error["code"] == "unsupported_parameter"
