"""Tool calls over HTTP, with the official client."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion

from gateway.text.output.tool_call_reader import CallDelta
from gateway.text.tool_calls import ToolCallForm, ToolCallParser
from tandem.v1 import sampling_pb2
from tests.gateway.openai.clients import official_client, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

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
LLAMA = '{"name": "weather", "parameters": {"city": "Graz"}}; {"name": "time"}'
OTHER = '<tool_call>\n{"name": "time"}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": USER, "tools": TOOLS, **fields}


async def start(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, text: str, **options: Any
) -> RunningGateway:
    """A gateway whose model answers with a text."""
    verifier.play(lambda opened: [*texts(text), 0])
    return await start_api(**{"tool_call_parser": "hermes", **options})


@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"I look.\n{CALL}\n{OTHER}"),
        ("hermes", f"{CALL[:-20]}]] and so on"),
        ("llama3_json", LLAMA),
        ("llama3_json", '{"name": "none"}'),
    ],
    ids=["calls", "a call with a mistake", "calls alone", "no call"],
)
async def test_the_official_clients_streaming_helper_assembles_the_whole_answers_calls(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    parser: str,
    text: str,
    num_tokens: int,
) -> None:
    token_ids = [*texts(text), 0]
    running = await start_api(tool_call_parser=parser)

    async def answer_in_steps(index: int) -> None:
        """Decides so many tokens a step, as accepted drafts do."""
        opened = await verifier.nth("open", index)
        length = opened.prompt_length
        for start in range(0, len(token_ids), num_tokens):
            step = token_ids[start : start + num_tokens]
            finish = STOP if start + num_tokens >= len(token_ids) else 0
            verifier.send(verifier.decided(opened.sequence_id, length + start, step, finish=finish))

    async with official_client(running) as client:
        whole, _ = await asyncio.gather(
            client.chat.completions.create(model="scripted", messages=USER, tools=TOOLS),
            answer_in_steps(0),
        )

        async def assemble() -> Any:
            completions = client.chat.completions
            async with completions.stream(model="scripted", messages=USER, tools=TOOLS) as stream:
                return await stream.get_final_completion()

        assembled, _ = await asyncio.gather(assemble(), answer_in_steps(1))

    def told(choice: Any) -> Any:
        calls = choice.message.tool_calls or []
        return (
            choice.message.content or "",
            choice.finish_reason,
            [(call.type, call.function.name, call.function.arguments) for call in calls],
        )

    assert told(assembled.choices[0]) == told(whole.choices[0])
    assert bool(whole.choices[0].message.tool_calls) == (text != '{"name": "none"}')
    # In the next turn, clients send back what their helpers made of an answer.
    verifier.play(lambda opened: [*texts("so"), 0])
    async with official_client(running) as client:
        for choice in (assembled.choices[0], whole.choices[0]):
            answered: Any = [
                {"role": "tool", "tool_call_id": call.id, "content": "5"}
                for call in choice.message.tool_calls or []
            ]
            sent_back: list[Any] = [choice.message, choice.message.model_dump()]
            for message in sent_back:
                again = await client.chat.completions.create(
                    model="scripted", messages=[*USER, message, *answered], tools=TOOLS
                )
                assert again.choices[0].message.content == "so"


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [("hermes", f"I look.\n{CALL}\n{OTHER}", "I look."), ("llama3_json", LLAMA, None)],
)
async def test_calls_after_the_first_are_left_out_where_only_one_is_wanted(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    parser: str,
    text: str,
    content: str | None,
) -> None:
    running = await start(start_api, verifier, texts, text, tool_call_parser=parser)
    fields = body(parallel_tool_calls=False)
    answer = await post(running, PATH, fields)
    choice: Any = ChatCompletion.model_validate_json(answer.body).choices[0]
    assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
    [call] = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Graz"}')
    stream = await post(running, PATH, {**fields, "stream": True})
    deltas = [
        delta
        for chunk in stream.events[:-1]
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert {delta["index"] for delta in deltas} == {0}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Graz"}'
    assert stream.events[-2]["choices"][0]["finish_reason"] == "tool_calls"


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


async def test_a_call_that_the_length_cuts_stays_text_until_it_has_begun(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    running = await start(start_api, verifier, texts, CALL)
    begun = set()
    for max_tokens in range(1, len(texts(CALL))):
        answer = json.loads((await post(running, PATH, body(max_tokens=max_tokens))).body)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        content, calls = choice["message"]["content"], choice["message"].get("tool_calls")
        begun.add(calls is not None)
        if calls is None:
            assert content
            assert CALL.startswith(content)
        else:
            assert content is None
            assert calls[0]["function"]["name"] == "weather"
            assert '{"city": "Graz"}'.startswith(calls[0]["function"]["arguments"])
    assert begun == {False, True}


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
@pytest.mark.parametrize("parser", [form.value for form in ToolCallForm])
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
    marks = ToolCallForm(parser).marks
    key = "parameters" if parser == "llama3_json" else "arguments"
    text = f'{{"name":"weather","{key}":{{"city":"Graz"}}}}'
    if marks is None:
        schema = json.loads(grammar.json_schema)
        written = LLMatcher.grammar_from_json_schema(grammar.json_schema)
    else:
        schema = json.loads(grammar.lark.partition("%json")[2])
        written = grammar.lark
        if parser in ("hermes_list", "mistral", "granite"):
            text = f"[{text}]"
        text = f"{marks.begin}\n{text}\n{marks.end}" if marks.end else f"{marks.begin}{text}"
    matcher = LLMatcher(LLTokenizer("byte"), written, log_level=0)
    assert matcher.validate_tokens(list(text.encode())) == len(text.encode())
    # What the grammar makes is read as the call.
    reader = ToolCallParser(ToolCallForm(parser), ["weather"])
    assert reader.feed(text).pieces[0] == CallDelta("weather", "")
    assert {each["properties"]["name"]["const"] for each in schema["anyOf"]} == names


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


RECURSIVE = {
    "$id": "https://example.org/tree",
    "type": "object",
    "properties": {
        # Names of properties are no keywords.
        "$ref": {"$ref": "#/properties/value"},
        "$id": {"$ref": "#/definitions/id"},
        "enum": {"$ref": "#/$defs/kind"},
        "value": {"type": "integer", "default": {"$ref": "#"}},
        "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"kind": {"const": "small"}},
    "definitions": {"id": {"type": "string"}},
}


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
async def test_references_of_a_call_that_must_come_are_to_its_tools_own_parameters(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, parser: str
) -> None:
    running = await start(start_api, verifier, texts, CALL, tool_call_parser=parser)
    # The same name, defined otherwise.
    other = {"$defs": {"kind": {"const": "large"}}, "properties": {"x": {"const": {"$ref": "x"}}}}
    tools = [tool(other, "g"), tool(RECURSIVE)]
    assert (await post(running, PATH, body(tools=tools, tool_choice="required"))).status == 200
    grammar = (await verifier.nth("open", 0)).sampling.structured_output
    assert isinstance(grammar, sampling_pb2.StructuredOutput)
    child = {"value": 2, "child": {"value": 3, "child": None}}
    right = {"$ref": 3, "$id": "x", "enum": "small", "value": 1, "child": child}
    for given, more, is_allowed in [
        (right, {}, True),
        (right, {"more": 1}, False),
        ({"value": 1, "child": {"name": "f"}}, {}, False),
        ({"$id": 5, "value": 1}, {}, False),
        ({"enum": "large", "value": 1}, {}, False),
    ]:
        key = "arguments" if parser == "hermes" else "parameters"
        text = json.dumps({"name": "f", key: given, **more}, separators=(",", ":"))
        if parser == "hermes":
            text, written = f"<tool_call>\n{text}\n</tool_call>", grammar.lark
        else:
            written = LLMatcher.grammar_from_json_schema(grammar.json_schema)
        matcher = LLMatcher(LLTokenizer("byte"), written, log_level=0)
        num_allowed = matcher.validate_tokens(list(text.encode()))
        assert not matcher.is_error(), matcher.get_error()
        assert (num_allowed == len(text)) == is_allowed, given


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {
            "$ref": "#/$defs/any",
            "$defs": {"any": {"properties": {"x": {"$ref": "#/$defs/number"}}, "required": ["x"]},
                      "number": {"type": "integer"}},
        },
    ],
    ids=["no type", "several types", "a reference"],
)  # fmt: skip
async def test_the_arguments_of_a_call_that_must_come_are_an_object(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, parameters: Any
) -> None:
    running = await start(start_api, verifier, texts, CALL, tool_call_parser="llama3_json")
    tools = [tool(parameters)]
    assert (await post(running, PATH, body(tools=tools, tool_choice="required"))).status == 200
    grammar = (await verifier.nth("open", 0)).sampling.structured_output
    assert isinstance(grammar, sampling_pb2.StructuredOutput)
    written = LLMatcher.grammar_from_json_schema(grammar.json_schema)
    for given, is_allowed in (
        ({"x": 1}, True), ({"x": "a"}, False), ({}, False), (5, False), ("a", False), (None, False),
    ):  # fmt: skip
        text = json.dumps({"name": "f", "parameters": given}, separators=(",", ":"))
        matcher = LLMatcher(LLTokenizer("byte"), written, log_level=0)
        num_allowed = matcher.validate_tokens(list(text.encode()))
        assert (num_allowed == len(text)) == is_allowed, given


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#a"}}},
        {"properties": {"a": {"anyOf": [{"$ref": "https://example.org/a"}]}}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"$id": "https://example.org/a"}}},
        {"$defs": 5},
        {"definitions": ["a"]},
        {"type": "string"},
        {"type": ["null", "string"]},
    ],
    ids=lambda parameters: json.dumps(parameters),
)
async def test_parameters_that_cannot_be_a_calls_grammar_are_refused_by_name(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, parameters: Any
) -> None:
    running = await start(start_api, verifier, texts, CALL)
    fields: dict[str, Any] = {"tools": [TOOLS[0], tool(parameters)]}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = await post(running, PATH, body(**fields, tool_choice=choice))
        assert answer.status == 400
        assert answer.error["param"] == "tools.1.function.parameters"
    assert (await post(running, PATH, body(**fields))).status == 200, "its template may know more"


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
