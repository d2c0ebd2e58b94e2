"""`/v1/responses`, with the official client; chat completions are the oracle of what is run."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response

from gateway.api.openai.responses import answer as response_answer
from tests.gateway.openai.clients import RESPONSE_EVENT, official_client, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

Texts = Callable[[str], list[int]]

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "Weather in Graz?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "of today", "parameters": PARAMETERS},
    {"type": "function", "name": "time", "strict": True},
]
CHAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of today", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time"}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "Weather in Graz?", **fields}


def shown(response: Any) -> list[tuple[str, ...]]:
    """What is in its items: kind, status, and text or name and arguments."""
    return [
        (item.type, item.status, item.content[0].text)
        if item.type == "message"
        else (item.type, item.status, item.name, item.arguments)
        for item in response.output
    ]


@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("It rains.", [("message", "completed", "It rains.")]),
        ("", [("message", "completed", "")]),
        (CALL, [("function_call", "completed", "weather", '{"city": "Graz"}')]),
        (
            f"I look.\n{CALL}\n{OTHER}",
            [
                ("message", "completed", "I look."),
                ("function_call", "completed", "weather", '{"city": "Graz"}'),
                ("function_call", "completed", "time", "{}"),
            ],
        ),
        (
            f"I look.\n{CALL}\nAnd then, {OTHER} done.",
            [
                ("message", "completed", "I look."),
                ("function_call", "completed", "weather", '{"city": "Graz"}'),
                ("message", "completed", "\nAnd then,"),
                ("function_call", "completed", "time", "{}"),
                ("message", "completed", " done."),
            ],
        ),
    ],
    ids=["text", "nothing", "a call", "text and calls", "text between calls"],
)
async def test_a_stream_has_the_items_of_the_whole_answer(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    text: str,
    items: list[tuple[str, ...]],
    num_tokens: int,
) -> None:
    token_ids = [*texts(text), 0]
    running = await start_api(tool_call_parser="hermes", stream_interval_s=0)

    async def answer_in_steps(index: int) -> None:
        opened = await verifier.nth("open", index)
        for start in range(0, len(token_ids), num_tokens):
            step = token_ids[start : start + num_tokens]
            finish = STOP if start + num_tokens >= len(token_ids) else 0
            length = opened.prompt_length + start
            verifier.send(verifier.decided(opened.sequence_id, length, step, finish=finish))

    async with official_client(running) as client:

        async def assemble() -> tuple[Any, list[Any]]:
            async with client.responses.stream(
                model="scripted", input=USER, tools=TOOLS, store=False
            ) as stream:
                events = [event async for event in stream]
                return await stream.get_final_response(), events

        whole, _ = await asyncio.gather(
            client.responses.create(model="scripted", input=USER, tools=TOOLS), answer_in_steps(0)
        )
        (assembled, events), _ = await asyncio.gather(assemble(), answer_in_steps(1))
    assert shown(whole) == shown(assembled) == items
    assert whole.status == assembled.status == "completed"
    assert whole.usage is not None
    assert whole.usage == assembled.usage
    assert whole.usage.output_tokens == len(token_ids)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ids = [item.id for response in (whole, assembled) for item in response.output]
    assert len(set(ids)) == len(ids)
    # In the next turn, clients send the items back, with what the official one made of them.
    verifier.play(lambda opened: [*texts("so"), 0])
    async with official_client(running) as client:
        for response in (whole, assembled):
            sent_back: list[Any] = [item.to_dict() for item in response.output]
            answered: list[Any] = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
                for item in sent_back
                if item["type"] == "function_call"
            ]
            again = await client.responses.create(
                model="scripted",
                input=[*USER, *sent_back, *answered],
                tools=TOOLS,
            )
            assert again.output_text == "so"


async def test_every_event_and_answer_has_the_official_clients_form(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    verifier.play(lambda opened: [*texts(f"I look.\n{CALL}"), 0])
    running = await start_api(tool_call_parser="hermes", stream_interval_s=0)
    fields = body(
        tools=TOOLS, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    )
    stream = await post(running, PATH, {**fields, "stream": True})
    events = [RESPONSE_EVENT.validate_python(each) for each in stream.typed_events]
    kinds = [event.type for event in events]
    assert stream.body.count("data: ") == len(events), "there is no [DONE]"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    for kind in ("output_text.delta", "output_text.done", "content_part.done", "output_item.done"):
        assert f"response.{kind}" in kinds
    for kind in ("delta", "done"):
        assert f"response.function_call_arguments.{kind}" in kinds
    whole: Any = Response.model_validate_json((await post(running, PATH, fields)).body)
    last: Any = Response.model_validate(stream.typed_events[-1]["response"])
    message = whole.output[0]
    assert message.type == "message"
    assert {len(each.top_logprobs) for each in message.content[0].logprobs} == {0}
    assert last.output[0].type == "message"
    assert last.output[0].content == message.content
    deltas = [each for each in stream.typed_events if each["type"] == "response.output_text.delta"]
    streamed = [logprob for each in deltas for logprob in each["logprobs"]]
    assert streamed == [each.model_dump() for each in message.content[0].logprobs]


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    (
        {"instructions": "Be brief.", "input": USER},
        {"messages": [{"role": "system", "content": "Be brief."}, *USER]},
    ),
    (
        {
            "input": [
                {"role": "developer", "content": "d"},
                *USER,
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "I", "annotations": []},
                        {"type": "output_text", "text": "look.", "logprobs": []},
                    ],
                },
                {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"},
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "status": "completed",
                    "call_id": "2",
                    "name": "weather",
                    "arguments": '{"city": "Graz"}',
                },
                {"type": "function_call_output", "call_id": "1", "output": "noon"},
                {
                    "type": "function_call_output",
                    "call_id": "2",
                    "output": [{"type": "input_text", "text": "rain"}],
                },
                {"role": "user", "content": "And now?"},
            ],
            "tools": TOOLS,
        },
        {
            "messages": [
                {"role": "system", "content": "d"},
                *USER,
                {
                    "role": "assistant",
                    "content": "I\nlook.",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "time", "arguments": "{}"},
                        },
                        {
                            "id": "2",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Graz"}'},
                        },
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "noon"},
                {"role": "tool", "tool_call_id": "2", "content": "rain"},
                {"role": "user", "content": "And now?"},
            ],
            "tools": CHAT_TOOLS,
        },
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "time"}},
        {
            "tools": CHAT_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "time"}},
        },
    ),
    ({"tools": TOOLS, "tool_choice": "none"}, {"tools": CHAT_TOOLS, "tool_choice": "none"}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": PARAMETERS},
            }
        },
    ),
    (
        {"text": {"format": {"type": "json_object"}}},
        {"response_format": {"type": "json_object"}},
    ),
    (
        {
            "max_output_tokens": 7,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 3,
        },
        {"max_completion_tokens": 7, "logprobs": True, "top_logprobs": 3},
    ),
    *(
        (same, same)
        for same in (
            {"temperature": 0.5, "top_p": 0.5, "seed": 3, "stop": ["x"]},
            {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "priority": 2},
            {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1.0}},
            {"min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True},
            {"speculation": {"enabled": False}},
            {"chat_template_kwargs": {"shout": True}},
        )
    ),
]


async def test_the_same_is_run_as_for_a_chat_completion(
    start_api: StartApi, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 6, 0])
    running = await start_api(tool_call_parser="hermes")
    # Else each request gets a seed of its own.
    seed = {"seed": 1}
    for fields, chat_fields in EQUAL:
        answer = await post(running, PATH, {**seed, **body(**fields)})
        assert answer.status == 200, answer.body
        chat_body = {"model": "scripted", "messages": USER, **seed, **chat_fields}
        chat = await post(running, CHAT, chat_body)
        assert chat.status == 200, chat.body
        opened = verifier.commands("open")[-2:]
        for each in opened:
            each.sequence_id = ""
        assert opened[0] == opened[1]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": [5]}, "input.0", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "invalid_value"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input.0",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content.0",
        "unsupported_parameter",
    ),
    ({"messages": USER}, "messages", "unknown_parameter"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "invalid_value"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema",
        "missing_required_parameter",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}],
            "tool_choice": "required",
        },
        "tools.0.parameters",
        "invalid_value",
    ),
    ({"include": ["bogus"]}, "include.0", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"input": "x " * 40_000}, "input", "context_length_exceeded"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
    (
        {"speculation": {"report": True}, "stream": True},
        "speculation.report",
        "unsupported_parameter",
    ),
    ({"model": "other"}, "model", "model_not_found"),
]


async def test_what_is_wrong_or_not_supported_is_named(start_api: StartApi) -> None:
    running = await start_api(tool_call_parser="hermes")
    for fields, param, code in WRONG:
        answer = await post(running, PATH, body(**fields))
        assert answer.status == (404 if code == "model_not_found" else 400)
        assert (answer.error["param"], answer.error["code"]) == (param, code), answer.body


async def test_an_output_that_the_length_ends_is_incomplete(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts
) -> None:
    verifier.play(lambda opened: [*texts("It rains."), 0])
    running = await start_api()
    fields = body(max_output_tokens=2)
    whole: Any = Response.model_validate_json((await post(running, PATH, fields)).body)
    stream = await post(running, PATH, {**fields, "stream": True})
    last = stream.typed_events[-1]
    assert last["type"] == "response.incomplete"
    answers: list[Any] = [whole, Response.model_validate(last["response"])]
    for response in answers:
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert [item.status for item in response.output] == ["incomplete"]
        assert response.max_output_tokens == 2


async def test_a_stream_keeps_no_more_than_an_answer_may_hold(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier.play(lambda opened: [*texts("Es regnet nicht, 日本."), 0])
    running = await start_api(stream_interval_s=0)

    async def events() -> list[dict[str, Any]]:
        return (await post(running, PATH, body(stream=True))).typed_events

    num_bytes = sum(len(json.dumps(each["delta"])) for each in await events() if "delta" in each)
    for most, kind in ((4 * num_bytes, "response.completed"), (4 * num_bytes - 4, "error")):
        monkeypatch.setattr(response_answer, "MAX_ANSWER_BYTES", most)
        last = (await events())[-1]
        RESPONSE_EVENT.validate_python(last)
        assert last["type"] == kind
    assert (last["param"], last["code"]) == ("max_output_tokens", "answer_too_large")
    await running.until_idle()
