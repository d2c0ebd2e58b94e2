"""Lossless batching (docs/acceptance.md), and drafts, with a real model: the file that
`make real-model` fetches, beside transformers in float32.
"""

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.real.tasks import PROMPT, real_tasks
from benchmarks.workloads import REAL_MODEL, Task
from gateway.text.chat_template import ChatTemplate
from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import read_header
from tandem.client import (
    AsyncTandemClient,
    Generation,
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
)
from tandem.local import local_tandem

pytestmark = [
    pytest.mark.skipif(not REAL_MODEL.exists(), reason="make real-model"),
    # The first start compiles kernels for weights in groups.
    pytest.mark.timeout(600),
]

NUM_TOKENS = 96
NUM_COMPARED = 32
# Inputs are rounded to 16 bits, and K/V is float16: so far logprobs may be off, and logits that are
# so near may come in another order.
LOGPROB_ERROR = 0.006
NEAR_TIE = 0.02
CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def addresses() -> Iterator[Mapping[str, str]]:
    environ = {
        **os.environ,
        "TANDEM_GATEWAY_DRAFT_WAIT": "always",
        "TANDEM_VERIFIER_SPECULATION_DEPTH": "limits",
    }
    with local_tandem(model=REAL_MODEL, environ=environ, quiet=True) as started:
        yield started


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """One of each kind."""
    by_kind = real_tasks(REAL_MODEL, count=1, max_new_tokens=NUM_TOKENS)
    return [some[0] for kind, some in by_kind.items() if kind != PROMPT]


@pytest.fixture(scope="module")
def answers(addresses: Mapping[str, str], tasks: Sequence[Task]) -> dict[bool, list[Generation]]:
    """By whether drafts are verified: then all tasks run at once, else one after the other."""

    async def ask() -> dict[bool, list[Generation]]:
        async with AsyncTandemClient(addresses["grpc"]) as client:

            async def one(task: Task, drafts: bool) -> Generation:
                request = GenerationRequest(
                    prompt=task.prompt_token_ids,
                    max_new_tokens=task.max_new_tokens,
                    sampling=SamplingParams(logprobs=0),
                    speculation=SpeculationParams(enabled=drafts),
                )
                return await client.generate(request)

            plain = [await one(task, False) for task in tasks]
            return {False: plain, True: list(await asyncio.gather(*(one(t, True) for t in tasks)))}

    return asyncio.run(ask())


def test_drafts_and_neighbours_change_no_token(answers: dict[bool, list[Generation]]) -> None:
    plain, drafted = ([each.token_ids for each in answers[drafts]] for drafts in (False, True))
    assert drafted == plain
    assert sum(each.usage.num_accepted_tokens for each in answers[True]) > NUM_TOKENS
    assert all(each.usage.num_drafts == 0 for each in answers[False])


def test_greedy_answers_are_those_of_transformers_in_float32(
    answers: dict[bool, list[Generation]], tasks: Sequence[Task]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        REAL_MODEL.parent, gguf_file=REAL_MODEL.name, dtype=torch.float32
    ).eval()
    for task, answer in zip(tasks, answers[False], strict=True):
        own = answer.token_ids[:NUM_COMPARED]
        whole = torch.tensor([[*task.prompt_token_ids, *own]])
        with torch.inference_mode():
            logits = model(whole, logits_to_keep=len(own) + 1).logits[0, :-1]
        # Behind the same text, so each token is compared, not only those before a first difference.
        chosen = logits[range(len(own)), list(own)]
        gaps = logits.max(dim=-1).values - chosen
        assert gaps.max() < NEAR_TIE, (own, gaps)
        expected = (chosen - logits.logsumexp(dim=-1)).tolist()
        logprobs = [each.logprob for each in answer.choices[0].logprobs[:NUM_COMPARED]]
        assert logprobs == pytest.approx(expected, abs=LOGPROB_ERROR)


def test_a_conversation_is_rendered_by_the_files_template(addresses: Mapping[str, str]) -> None:
    folder = model_folder(REAL_MODEL)
    template = ChatTemplate.load(folder)
    assert template is not None
    metadata = read_header(REAL_MODEL).metadata
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=metadata["tokenizer.chat_template"],
    )
    expected = reference.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False
    )
    assert template.render(CONVERSATION) == expected
    assert "<|im_start|>user\nWhat is" in expected
    body = {"model": REAL_MODEL.stem, "messages": CONVERSATION, "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(
        f"http://{addresses['http']}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert answer["usage"]["prompt_tokens"] == len(reference.encode(expected))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    # At the template's end token, not at the limit.
    assert answer["choices"][0]["finish_reason"] == "stop"
