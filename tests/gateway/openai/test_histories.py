"""Messages that clients send back as servers gave them: what they say counts, the rest is left."""

import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import (
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputMessage,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

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
    ("fields", "content"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"refusal": "I cannot."}, "I cannot."),
        ({"content": "x", "refusal": "I cannot."}, "x\nI cannot."),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (
            {"content": [{"type": "text", "text": "x"}, {"type": "refusal", "refusal": "no"}]},
            "x\nno",
        ),
        ({"content": [{"type": "text", "text": "x", "cache_control": {"type": "y"}}]}, "x"),
        ({"content": [{"type": "text", "text": "x", "annotations": []}]}, "x"),
    ],
)
def test_a_refusal_is_text(fields: Mapping[str, Any], content: str) -> None:
    assert given(USER, {"role": "assistant", **fields})[1]["content"] == content


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


def test_reasoning_of_which_nothing_came_is_a_message_of_its_own() -> None:
    messages = given_items(USER, thoughts("t"), USER, thoughts("u"))
    assert [(each["role"], each.get("reasoning_content")) for each in messages] == [
        ("user", None),
        ("assistant", "t"),
        ("user", None),
        ("assistant", "u"),
    ]


_PARSED: Mapping[str, Any] = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "x", "annotations": [], "parsed": {"a": 1}}],
}
ITEMS = [
    ResponseOutputMessage.model_validate(_PARSED),
    ParsedResponseOutputMessage.model_validate(_PARSED),
    ResponseReasoningItem.model_validate({"id": "1", **thoughts("t")}),
    *(
        kind.model_validate(
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        )
        for kind in (ResponseFunctionToolCall, ParsedResponseFunctionToolCall)
    ),
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_items_of_the_official_client_come_back_however_they_are_dumped(
    item: openai.BaseModel,
) -> None:
    expected = given_items(USER, item.to_dict())
    # With every field of the client's class, by its name in Python.
    assert given_items(USER, item.model_dump()) == expected
    assert given_items(USER, item.model_dump(by_alias=True)) == expected


@pytest.mark.parametrize("kind", [ChatCompletionMessage, ParsedChatCompletionMessage])
def test_messages_of_the_official_client_come_back_however_they_are_dumped(
    kind: type[openai.BaseModel],
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = kind.model_validate(
        {"role": "assistant", "content": "x", "tool_calls": [call], "reasoning_content": "t"}
    )
    expected = given(USER, message.to_dict())
    assert expected[1]["reasoning_content"] == "t"
    assert given(USER, message.model_dump()) == expected


def test_a_refusal_in_a_response_is_text() -> None:
    part = {"type": "refusal", "refusal": "no"}
    item = {"type": "message", "role": "assistant", "id": "1", "content": [part]}
    assert given_items(item)[0]["content"] == "no"
