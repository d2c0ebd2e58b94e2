"""The OpenAI API in front of the real services: the same tokens as over gRPC.

The official client, both of its kinds; the model is the bundled one.
"""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.text.tokenizer import Tokenizer
from tandem.client import GenerationRequest, SamplingParams, SpeculationParams
from tests.integration.prompts import HELD_OUT, rename_prompts
from tests.integration.stack import (
    EVERY_DRAFT,
    MODEL,
    Stack,
    running_stack,
    verifier_config,
)

MODEL_ID = "model"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's tokenizer, with a chat template that only joins messages."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(chat_folder: Path) -> AsyncIterator[Stack]:
    verifier = verifier_config(allow_structured_output=True)
    gateway: dict[str, object] = {"tokenizer": chat_folder, "tool_call_parser": "hermes"}
    async with running_stack(verifier=verifier, gateway=gateway | EVERY_DRAFT) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{stack.gateway.http_address}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = {"return_token_ids": True}


def prompt_texts(count: int) -> list[str]:
    lines = HELD_OUT.read_text().splitlines()
    return [json.loads(line)["prompt"] for line in random.Random(1).sample(lines, count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculate", [True, False], ids=["drafts", "plain"])
async def test_answers_have_the_tokens_of_grpcs(
    stack: Stack, client: openai.AsyncOpenAI, temperature: float, speculate: bool
) -> None:
    for prompt in rename_prompts(3, seed=3):
        expected = await stack.generate(
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=64,
                sampling=SamplingParams(temperature=temperature, seed=7),
                speculation=SpeculationParams(enabled=speculate),
            )
        )
        asked: dict[str, Any] = {
            "model": MODEL_ID,
            "prompt": prompt,
            "max_tokens": 64,
            "temperature": temperature,
            "seed": 7,
            "extra_body": {**TOKENS, "speculation": {"enabled": speculate}},
        }
        whole = await client.completions.create(**asked)
        [choice] = whole.choices
        assert choice.model_dump()["token_ids"] == list(expected.token_ids)
        assert choice.text == expected.text
        assert whole.usage is not None
        drafted = whole.usage.model_dump()["speculation"]
        assert drafted["num_steps"] == expected.usage.num_steps or speculate
        assert (drafted["num_drafts"] > 0) == speculate
        token_ids: list[int] = []
        text = ""
        async for chunk in await client.completions.create(**asked, stream=True):
            token_ids += chunk.choices[0].model_dump().get("token_ids") or []
            text += chunk.choices[0].text
        assert (token_ids, text) == (list(expected.token_ids), expected.text)
    await stack.check_idle()


async def test_a_chat_is_its_rendered_prompt(stack: Stack, client: openai.AsyncOpenAI) -> None:
    [prompt] = prompt_texts(1)
    expected = await stack.generate(GenerationRequest(prompt=prompt, max_new_tokens=48))
    asked: dict[str, Any] = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": 48,
        "temperature": 0,
        "extra_body": TOKENS,
    }
    whole = await client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].model_dump()["token_ids"] == list(expected.token_ids)
    text = ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == expected.text


async def test_logprobs_are_grpcs_in_both_forms(stack: Stack, client: openai.AsyncOpenAI) -> None:
    tokenizer = Tokenizer.load(MODEL)
    [prompt] = prompt_texts(1)
    expected = await stack.generate(
        GenerationRequest(
            prompt=prompt,
            max_new_tokens=24,
            sampling=SamplingParams(temperature=0.0, logprobs=3),
        )
    )
    completion = await client.completions.create(
        model=MODEL_ID, prompt=prompt, max_tokens=24, temperature=0, logprobs=3, echo=True
    )
    chat = await client.chat.completions.create(
        model=MODEL_ID,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    prompt_ids = tokenizer.encode(prompt)
    shown = [tokenizer.token_bytes(token_id) for token_id in (*prompt_ids, *expected.token_ids)]
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert [token.encode() for token in logprobs.tokens] == shown
    # The offsets cut the text into the tokens, special ones aside.
    text = completion.choices[0].text
    assert text == prompt + expected.text
    assert logprobs.text_offset[0] == 0
    for token, start, end in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.text_offset[1:], strict=False
    ):
        assert text[start:end] in (token, "")
    # The client's type knows no prompt without a first logprob.
    assert logprobs.token_logprobs[:1] == [None]
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(len(top) in (3, 4) for top in logprobs.top_logprobs[1:])
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    of_completion = logprobs.token_logprobs[len(prompt_ids) :]
    for entry, token_id, value in zip(
        content.content, expected.token_ids, of_completion, strict=True
    ):
        assert entry.bytes == list(tokenizer.token_bytes(token_id))
        assert entry.logprob == pytest.approx(value)
        # Greedy: the likeliest token.
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 3


async def test_a_tool_call_that_must_come_comes(client: openai.AsyncOpenAI) -> None:
    await forced_call(client, MODEL_ID)


@pytest.mark.parametrize("is_special", [False, True], ids=["added", "special"])
async def test_a_tool_call_that_must_come_is_written_with_the_models_own_tokens(
    tmp_path: Path, is_special: bool
) -> None:
    """Where its tokenizer has the tags as tokens, as Qwen's does."""
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tags = {"<|rename|>": "<tool_call>", "<|to|>": "</tool_call>"}
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in tags:
            token["content"], token["special"] = tags[token["content"]], is_special
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {tags.get(each, each): i for each, i in vocabulary.items()}
    for name, content in (
        ("tokenizer.json", json.dumps(tokenizer)),
        ("chat_template.jinja", TEMPLATE),
    ):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).write_text(content)
    verifier = verifier_config(model=tmp_path, allow_structured_output=True)
    gateway: dict[str, object] = {"tokenizer": tmp_path, "tool_call_parser": "hermes"}
    async with (
        running_stack(verifier=verifier, gateway=gateway | EVERY_DRAFT) as stack,
        openai.AsyncOpenAI(
            base_url=f"http://{stack.gateway.http_address}/v1", api_key="any", max_retries=0
        ) as client,
    ):
        for extra in ({}, {"speculation": {"enabled": False}}):
            token_ids = await forced_call(client, tmp_path.name, **extra)
            assert [token_ids[0], token_ids[-2]] == [vocabulary[each] for each in tags]


async def forced_call(client: openai.AsyncOpenAI, model: str, **extra: object) -> list[int]:
    """Has a model call a function; returns the tokens of the answer."""
    parameters = {
        "type": "object",
        "properties": {"is_sum": {"type": "boolean"}},
        "required": ["is_sum"],
        "additionalProperties": False,
    }
    function: Any = {"name": "rename", "parameters": parameters}
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt_texts(1)[0]}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "rename"}},
        temperature=0,
        max_completion_tokens=120,
        extra_body={**TOKENS, **extra},
    )
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "rename"
    assert json.loads(call.function.arguments)["is_sum"] in (True, False)
    token_ids: list[int] = choice.model_dump()["token_ids"]
    return token_ids
