"""A model's reasoning over HTTP, with the official client."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import RESPONSE_EVENT, official_client, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

PATH, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER: list[Any] = [{"role": "user", "content": "Weather in Graz?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "time"}}]
CALL = '<tool_call>\n{"name": "time"}\n</tool_call>'
TEMPLATE = (
    "{# knows </think> #}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or () %}({{ call.function.name }}){% endfor %}{% endfor %}"
    "[assistant]{% if is_open %}<think>\n{% elif is_over %}<think></think>{% endif %}"
)


@pytest.fixture
async def verifier(start_verifier: StartVerifier) -> ScriptedVerifier:
    return await start_verifier(vocab_size=2050)


@pytest.fixture
def texts(chat_folder: Path) -> Callable[[str], list[int]]:
    """The tokens of a text; the model has the tags as tokens, and a template that knows them."""
    file = chat_folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["</think>"])
    tokenizer.add_tokens(["<think>"])
    file.unlink()  # a link
    file.write_text(tokenizer.to_str())
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": USER, **fields}


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content", "num_tokens"),
    [
        ("<think>\nIt may rain.\n</think>\n\nRain.", False, "It may rain.", "Rain.", None),
        ("It may rain.</think>Rain.", True, "It may rain.", "Rain.", None),
        ("<think></think>Rain.", False, "", "Rain.", 2),
        ("Rain. </think>", False, "", "Rain. </think>", 0),
    ],
    ids=["tags", "begun by the prompt", "none between tags", "none"],
)
async def test_reasoning_comes_beside_the_answer(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Callable[[str], list[int]],
    text: str,
    is_open: bool,
    reasoning: str,
    content: str,
    num_tokens: int | None,
) -> None:
    token_ids = texts(text)
    end = texts("</think>")[0]
    if num_tokens is None:
        num_tokens = token_ids.index(end) + 1
    verifier.play(lambda opened: [*token_ids, 0])
    running = await start_api(stream_interval_s=0)
    fields: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"is_open": is_open}}}
    async with official_client(running) as client:
        whole = await client.chat.completions.create(model="scripted", messages=USER, **fields)
        stream = await client.chat.completions.create(
            model="scripted",
            messages=USER,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        chunks = [chunk async for chunk in stream]
    [choice] = whole.choices
    assert choice.message.content == content
    assert (choice.message.model_extra or {}).get("reasoning_content", "") == reasoning
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == content
    told = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(told) == reasoning
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == num_tokens


async def test_calls_come_after_reasoning_and_both_forms_of_answers_agree(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    text = f"<think>Which {CALL}?</think>I look.\n{CALL}"
    verifier.play(lambda opened: [*texts(text), 0])
    running = await start_api(tool_call_parser="hermes", stream_interval_s=0)
    answer = await post(running, PATH, body(tools=TOOLS))
    whole: Any = ChatCompletion.model_validate_json(answer.body)
    message = whole.choices[0].message
    assert message.reasoning_content == f"Which {CALL}?"
    assert message.content == "I look."
    assert [call.function.name for call in message.tool_calls or []] == ["time"]
    stream = await post(running, PATH, body(tools=TOOLS, stream=True))
    for event in stream.events[:-1]:
        delta = ChatCompletionChunk.model_validate(event).choices[0].delta
        assert delta.content is None or "reasoning_content" not in (delta.model_extra or {})

    given = {"model": "scripted", "input": USER, "tools": [{"type": "function", "name": "time"}]}
    response: Any = Response.model_validate_json((await post(running, RESPONSES, given)).body)
    events = (await post(running, RESPONSES, {**given, "stream": True})).typed_events
    for each in events:
        RESPONSE_EVENT.validate_python(each)
    kinds = [each["type"] for each in events]
    assert "response.reasoning_text.delta" in kinds
    assert "response.reasoning_text.done" in kinds
    answers: list[Any] = [response, Response.model_validate(events[-1]["response"])]
    for found in answers:
        first, second, third = found.output
        assert first.type == "reasoning"
        assert first.content[0].text == message.reasoning_content
        assert second.type == "message"
        assert second.content[0].text == "I look."
        assert third.type == "function_call"
        assert found.usage is not None
        told = found.usage.output_tokens_details.reasoning_tokens
        assert told == whole.usage.completion_tokens_details.reasoning_tokens

    # Both are sent back, and the template shows the same.
    calls = [call.to_dict() for call in message.tool_calls or []]
    earlier = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls,
    }
    tool = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "noon"}
    output = [item.to_dict() for item in response.output]
    result = {
        "type": "function_call_output",
        "call_id": output[-1]["call_id"],
        "output": "noon",
    }
    await post(running, PATH, body(messages=[*USER, earlier, tool], seed=1))
    await post(
        running, RESPONSES, {"model": "scripted", "input": [*USER, *output, result], "seed": 1}
    )
    opened = [await verifier.nth("open", n) for n in (4, 5)]
    assert opened[0].token_ids == opened[1].token_ids
    assert texts("</think>")[0] in list(opened[0].token_ids)


@pytest.mark.parametrize("num_tokens", [1, 3, 100])
async def test_tokens_are_counted_up_to_a_tag_of_several_tokens(
    start_api: StartApi, verifier: ScriptedVerifier, tokenizer: Tokenizer, num_tokens: int
) -> None:
    reasoning = tokenizer.encode("<think>It may rain.</think>")
    token_ids = [*reasoning, *tokenizer.encode("It rains."), 0]
    assert len(tokenizer.encode("</think>")) > 1
    running = await start_api(reasoning_parser="think")
    given = {"model": "scripted", "input": USER, "include": ["message.output_text.logprobs"]}
    asking = asyncio.ensure_future(post(running, RESPONSES, given))
    opened = await verifier.nth("open", 0)
    for first in range(0, len(token_ids), num_tokens):
        step = token_ids[first : first + num_tokens]
        finish = STOP if first + num_tokens >= len(token_ids) else 0
        length = opened.prompt_length + first
        verifier.send(
            verifier.decided(opened.sequence_id, length, step, finish=finish, with_logprobs=True)
        )
    response: Any = Response.model_validate_json((await asking).body)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len(reasoning)
    message = response.output[-1]
    assert message.type == "message"
    assert len(message.content[0].logprobs) == len(token_ids) - len(reasoning)


FORMAT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "variables", "tags"),
    [
        (FORMAT, {"is_open": True}, ("", "</think>")),
        (FORMAT, {}, ("<think>", "</think>")),
        (FORMAT, {"is_over": True}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, {"is_open": True}, ("", "</think>")),
    ],
)
async def test_a_grammar_begins_behind_the_reasoning(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Callable[[str], list[int]],
    fields: dict[str, Any],
    variables: dict[str, bool],
    tags: tuple[str, str] | None,
) -> None:
    text = "Hm.</think>\n{}" if variables.get("is_open") else "<think>Hm.</think>{}"
    verifier.play(lambda opened: [*texts(text), 0])
    running = await start_api(tool_call_parser="hermes")
    given = body(**fields, chat_template_kwargs=variables)
    answer = await post(running, PATH, given)
    [choice] = ChatCompletion.model_validate_json(answer.body).choices
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm."
    assert choice.message.content == "{}"
    opened = await verifier.nth("open", 0)
    structured = opened.sampling.structured_output
    assert structured.WhichOneof("grammar") is not None
    assert structured.HasField("reasoning") is (tags is not None)
    if tags is not None:
        assert (structured.reasoning.begin, structured.reasoning.end) == tags
