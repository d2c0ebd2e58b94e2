"""Messages that clients send back as servers gave them: what they say counts, the rest is left."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.api.openai.errors import ApiError
from gateway.api.openai.reading import chat, requests, schema
from gateway.api.openai.responses import conversion
from gateway.api.openai.responses.schema import ResponsesRequest

pytestmark = pytest.mark.stand_in

USER = {"role": "user", "content": "hi"}
CALL: Mapping[str, Any] = {"id": "1", "function": {"name": "f", "arguments": "{}"}}

#: By the servers and clients that note it.
NOTES: Mapping[str, Any] = {
    "annotations": [{"type": "url_citation", "url_citation": {"url": "http://x"}}],
    "audio": None,
    "cache_control": {"type": "ephemeral"},
    "citations": ["http://x"],
    "extra_content": {"google": {"thought_signature": "x"}},
    "finish_reason": "stop",
    "function_call": None,
    "id": "msg_1",
    "images": [],
    "index": 0,
    "logprobs": {"content": []},
    "name": None,
    "parsed": {"a": 1},
    "partial": False,
    "phase": "final_answer",
    "prefix": False,
    "provider_specific_fields": {"refusal": None},
    "reasoning": None,
    "reasoning_content": None,
    "reasoning_details": [{"type": "reasoning.text", "text": "x", "index": 0}],
    "reasoning_opaque": "x",
    "refusal": None,
    "status": "completed",
    "stop_reason": None,
    "thinking_blocks": [{"type": "thinking", "thinking": "x", "signature": "x"}],
    "token_ids": [1],
    "tool_calls": [],
    "usage": {"total_tokens": 3},
}


def given(*messages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the chat template is given of messages."""
    body = {"model": "scripted", "messages": messages}
    parsed = requests.parse(schema.ChatCompletionRequest, json.dumps(body).encode())
    return [dict(each) for each in chat.conversation(parsed, num_bytes=1).messages]


def given_items(*items: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What it is given of a response's items."""
    body = {"model": "scripted", "input": items}
    parsed = conversion.to_chat(requests.parse(ResponsesRequest, json.dumps(body).encode()))
    return [dict(each) for each in chat.conversation(parsed, num_bytes=1).messages]


@pytest.mark.parametrize("name", NOTES)
def test_what_servers_note_of_an_answer_changes_nothing(name: str) -> None:
    answer = {"role": "assistant", "content": "x"}
    expected = given(USER, answer, USER)
    for value in (NOTES[name], None):
        assert given(USER, {**answer, name: value}, USER) == expected
    assert given(USER, {**answer, **NOTES}, USER) == expected


@pytest.mark.parametrize(
    "noted",
    [
        {"index": 0, "type": "function"},
        {"index": 0, "type": None, "cache_control": {"type": "ephemeral"}},
        {"provider_specific_fields": {"thought_signature": "x"}},
        {"extra_content": {"google": {"thought_signature": "x"}}},
        {
            "function": {
                **CALL["function"],
                "parsed_arguments": {},
                "provider_specific_fields": None,
            }
        },
    ],
)
def test_what_servers_note_of_a_call_changes_nothing(noted: Mapping[str, Any]) -> None:
    messages = [{"role": "assistant", "tool_calls": [{**CALL, **each}]} for each in ({}, noted)]
    plain, with_notes = (given(USER, message) for message in messages)
    assert with_notes == plain
    assert plain[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning_content": "t"}, "t"),
        ({"reasoning": "t"}, "t"),
        ({"reasoning_text": "t"}, "t"),
        ({"thinking": "t"}, "t"),
        ({"reasoning": "t", "reasoning_details": [{"type": "reasoning.text", "text": "t"}]}, "t"),
        # As one server moved from the one name to the other, it wrote both.
        ({"reasoning_content": "t", "reasoning": "t"}, "t"),
        ({"reasoning_content": None, "reasoning": "t"}, "t"),
        ({"reasoning_content": "", "reasoning": "t"}, "t"),
        ({"reasoning_content": ""}, ""),
    ],
)
def test_reasoning_reaches_the_template_by_whichever_name(
    fields: Mapping[str, Any], thoughts: str
) -> None:
    message = given(USER, {"role": "assistant", "content": "x", **fields})[1]
    assert message == {"role": "assistant", "content": "x", "reasoning_content": thoughts}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        # They ask to go on with the message itself.
        ({"role": "assistant", "content": "x", "prefix": True}, "messages.0.prefix"),
        ({"role": "assistant", "content": "x", "partial": True}, "messages.0.partial"),
        ({"role": "assistant", "images": [{"type": "image_url"}]}, "messages.0.images"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
            "messages.0.tool_calls.0",
        ),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages.0.content.0"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    message: Mapping[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        given(message)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


def thoughts(text: str) -> Mapping[str, Any]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def test_reasoning_belongs_to_what_the_model_did_next() -> None:
    answer = {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "name": "f", "output": "o"}
    messages = given_items(thoughts("t"), thoughts("u"), answer, call, output, thoughts("v"), call)
    assert [(each["role"], each.get("reasoning_content")) for each in messages] == [
        ("assistant", "t\nu"),
        ("tool", None),
        ("assistant", "v"),
    ]
    assert messages[0]["content"] == "a"
    assert messages[1]["name"] == "f"
    assert all(messages[index]["tool_calls"] for index in (0, 2))
