"""A model's reasoning over HTTP, with the official client."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai import answer_schema
from tests.gateway.openai.clients import official_client, post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.openai.response_schema import Response, ResponseEvent
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
    whole = answer_schema.ChatCompletion.model_validate_json(answer.body)
    message = whole.choices[0].message
    assert message.reasoning_content == f"Which {CALL}?"
    assert message.content == "I look."
    assert [call.function.name for call in message.tool_calls or []] == ["time"]
    stream = await post(running, PATH, body(tools=TOOLS, stream=True))
    for event in stream.events[:-1]:
        chunk = answer_schema.ChatCompletionChunk.model_validate(event)
        delta = chunk.choices[0].delta
        assert delta.content is None or delta.reasoning_content is None

    given = {"model": "scripted", "input": USER, "tools": [{"type": "function", "name": "time"}]}
    response = Response.model_validate_json((await post(running, RESPONSES, given)).body)
    events = (await post(running, RESPONSES, {**given, "stream": True})).typed_events
    for each in events:
        ResponseEvent.model_validate(each)
    kinds = [each["type"] for each in events]
    assert "response.reasoning_text.delta" in kinds
    assert "response.reasoning_text.done" in kinds
    for found in (response, Response.model_validate(events[-1]["response"])):
        first, second, third = found.output
        assert first.type == "reasoning"
        assert first.content[0].text == message.reasoning_content
        assert second.type == "message"
        assert second.content[0].text == "I look."
        assert third.type == "function_call"
        assert found.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert found.usage.output_tokens_details == whole.usage.completion_tokens_details

    # Both are sent back, and the template shows the same.
    calls = [call.model_dump() for call in message.tool_calls or []]
    earlier = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls,
    }
    tool = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "noon"}
    output = [item.model_dump() for item in response.output]
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


async def test_reasoning_in_several_items_reaches_the_template_in_one_message(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    verifier.play(lambda opened: [*texts("Rain."), 0])
    running = await start_api()
    said = {"role": "assistant", "content": "Wait."}
    thoughts = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("Which day?", "Today.")
    ]
    given = {"model": "scripted", "input": [*USER, *thoughts, said, *USER], "seed": 1}
    assert (await post(running, RESPONSES, given)).status == 200
    said["reasoning_content"] = "Which day?\nToday."
    await post(running, PATH, body(messages=[*USER, said, *USER], seed=1))
    opened = [await verifier.nth("open", n) for n in (0, 1)]
    assert opened[0].token_ids == opened[1].token_ids


async def test_tokens_of_reasoning_are_counted_up_to_its_end_within_a_step(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    reasoning, answer = texts("<think>It may rain.</think>"), texts("It rains.")
    running = await start_api()
    asking = asyncio.ensure_future(post(running, PATH, body()))
    opened = await verifier.nth("open", 0)
    token_ids = [*reasoning, *answer, 0]
    verifier.send(
        verifier.decided(opened.sequence_id, opened.prompt_length, token_ids, finish=STOP)
    )
    whole = answer_schema.ChatCompletion.model_validate_json((await asking).body)
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(reasoning)


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
    response = Response.model_validate_json((await asking).body)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len(reasoning)
    message = response.output[-1]
    assert message.type == "message"
    assert len(message.content[0].logprobs) == len(token_ids) - len(reasoning)


async def test_the_beginning_of_a_tag_is_an_answer_if_no_more_comes(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    verifier.play(lambda opened: [*texts("<thi"), 0])
    running = await start_api(tool_call_parser="hermes")
    for fields in ({}, {"tools": TOOLS}):
        answer = await post(running, PATH, body(**fields))
        [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
        assert choice.message.content == "<thi"


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["<think>It may rain.</think>日本 it rains.", "日本 it rains."])
async def test_a_responses_message_has_the_logprobs_of_its_tokens_alone(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Callable[[str], list[int]],
    text: str,
    num_tokens: int,
) -> None:
    token_ids = [*texts(text), 0]
    end = texts("</think>")[0]
    num_reasoning = token_ids.index(end) + 1 if end in token_ids else 0
    running = await start_api(stream_interval_s=0)
    given = {
        "model": "scripted",
        "input": USER,
        "include": ["message.output_text.logprobs"],
        "stream": True,
    }
    asking = asyncio.ensure_future(post(running, RESPONSES, given))
    opened = await verifier.nth("open", 0)
    for first in range(0, len(token_ids), num_tokens):
        step = token_ids[first : first + num_tokens]
        is_last = first + num_tokens >= len(token_ids)
        decided = verifier.decided(
            opened.sequence_id, opened.prompt_length + first, step, finish=STOP if is_last else 0
        )
        for place, token_id in enumerate(step):
            decided.decided.logprobs.add(token_id=token_id, logprob=-(first + place + 1))
        verifier.send(decided)
    events = (await asking).typed_events
    response = Response.model_validate(events[-1]["response"])
    message = response.output[-1]
    assert message.type == "message"
    assert message.content[0].text == "日本 it rains."
    logprobs = [-each.logprob for each in message.content[0].logprobs]
    assert logprobs == list(range(num_reasoning + 1, len(token_ids) + 1))
    streamed = [each for event in events for each in event.get("logprobs", [])]
    assert [-each["logprob"] for each in streamed[: len(streamed) // 2]] == logprobs
    assert [item.type for item in response.output] == ["reasoning", "message"][not num_reasoning :]


async def test_an_output_that_is_cut_while_the_model_reasons_has_no_answer(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    verifier.play(lambda opened: [*texts("<think>It may rain.</think>Rain."), 0])
    running = await start_api()
    answer = await post(running, PATH, body(max_tokens=3))
    [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
    assert choice.finish_reason == "length"
    assert choice.message.content == ""
    assert choice.message.reasoning_content
    assert "It may rain.".startswith(choice.message.reasoning_content)
    given = {"model": "scripted", "input": USER, "max_output_tokens": 3}
    response = Response.model_validate_json((await post(running, RESPONSES, given)).body)
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]


async def test_reasoning_stays_text_where_it_is_not_looked_for(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    verifier.play(lambda opened: [*texts("<think>a b"), 0])
    running = await start_api(reasoning_parser="none")
    answer = await post(running, PATH, body())
    [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("<think>a b", None)


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
    [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
    assert choice.message.reasoning_content == "Hm."
    assert choice.message.content == "{}"
    opened = await verifier.nth("open", 0)
    structured = opened.sampling.structured_output
    assert structured.WhichOneof("grammar") is not None
    assert structured.HasField("reasoning") is (tags is not None)
    if tags is not None:
        assert (structured.reasoning.begin, structured.reasoning.end) == tags


async def test_a_call_that_no_end_of_the_reasoning_follows_is_one_in_every_form_of_answer(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Callable[[str], list[int]]
) -> None:
    verifier.play(lambda opened: [*texts(f"Hm.\n{CALL}"), 0])
    running = await start_api(tool_call_parser="hermes", stream_interval_s=0)
    given = body(tools=TOOLS, chat_template_kwargs={"is_open": True}, stop=["\n"])
    answer = await post(running, PATH, given)
    [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Hm."
    assert choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["time"]
    events = (await post(running, PATH, {**given, "stream": True})).events[:-1]
    choices = [answer_schema.ChatCompletionChunk.model_validate(each).choices[0] for each in events]
    assert choices[-1].finish_reason == "tool_calls"
    assert "".join(each.delta.reasoning_content or "" for each in choices) == "Hm."
    assert not any(each.delta.content for each in choices)
    calls = [call for each in choices for call in each.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["time"]


async def test_a_template_without_the_tags_leaves_them_in_the_text_unless_told_otherwise(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    chat_folder: Path,
    texts: Callable[[str], list[int]],
) -> None:
    template = TEMPLATE.replace("</think>", "").replace("<think>", "")
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    verifier.play(lambda opened: [*texts("<think>a</think>b"), 0])
    for option, content in (("auto", "<think>ab"), ("think", "b")):
        running = await start_api(reasoning_parser=option)
        answer = await post(running, PATH, body())
        [choice] = answer_schema.ChatCompletion.model_validate_json(answer.body).choices
        assert choice.message.content == content
