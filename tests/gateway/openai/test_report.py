"""`speculation.report`: what each chunk of a stream says about its drafts."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.openai.writing.report import SpeculationReport
from gateway.api.openai.writing.usage import UsageTotal
from gateway.messages.response import Chunk, Finished, Step
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2
from tandem.values import DraftSource, FinishReason, MatchAcceptance, Usage
from tests.gateway.openai.clients import Answer, connection, read_answer, request_bytes
from tests.gateway.openai.conftest import StartApi
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

Texts = Callable[[str], list[int]]


def traced(sequence_id: str, **step: Any) -> verifier_pb2.Event:
    return verifier_pb2.Event(
        step_traced=verifier_pb2.StepTraced(
            sequence_id=sequence_id, step=sampling_pb2.StepTrace(**step)
        )
    )


def reports(answer: Answer) -> list[dict[str, Any]]:
    """Those of a stream's chunks."""
    assert answer.events[-1] == "[DONE]"
    return [chunk["speculation"] for chunk in answer.events[:-1] if "speculation" in chunk]


async def stream(
    start_api: StartApi,
    verifier: ScriptedVerifier,
    texts: Texts,
    path: str,
    *,
    allow_trace: bool,
    allowed_by_verifier: bool = True,
) -> tuple[Answer, dict[str, int]]:
    """A stream of one step: two drafts accepted, two rejected, one more token."""
    verifier.allows_trace = allowed_by_verifier
    running = await start_api(allow_trace=allow_trace, drafters=["127.0.0.1:1"])
    prompt = (
        {"prompt": [1, 2]}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    fields = {"model": "scripted", "stream": True, "speculation": {"report": True}, **prompt}
    token_of = {text: texts(text)[0] for text in "abcde"}
    async with connection(running) as (reader, writer):
        writer.write(request_bytes(path, fields))
        opened = await verifier.nth("open", 0)
        is_traced = allow_trace and allowed_by_verifier
        assert opened.trace == is_traced
        drafts = [token_of[text] for text in "abde"]
        length = len(opened.token_ids)
        decided = verifier.decided(
            opened.sequence_id, length, [token_of[t] for t in "abc"], drafts=4, accepted=2
        )
        decided.decided.matched_ngram_length = 5
        decided.decided.source = drafter_pb2.SOURCE_POOL
        if is_traced:
            verifier.send(
                traced(opened.sequence_id, draft_token_ids=drafts, num_accepted_tokens=2), decided
            )
        else:
            verifier.send(decided)
        last = verifier.decided(opened.sequence_id, length + 3, [0], finish=STOP)
        verifier.send(last)
        return await read_answer(reader), token_of


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_chunk_tells_accepted_rejected_and_plain_tokens_apart(
    start_api: StartApi, verifier: ScriptedVerifier, texts: Texts, path: str
) -> None:
    answer, token_of = await stream(start_api, verifier, texts, path, allow_trace=True)
    first = reports(answer)[0]
    assert first == {
        "num_accepted_tokens": 2,
        "num_draft_tokens": 4,
        "tokens": [
            {"id": token_of["a"], "text": "a", "accepted": True},
            {"id": token_of["b"], "text": "b", "accepted": True},
            {"id": token_of["c"], "text": "c", "accepted": False},
        ],
        "rejected": [{"id": token_of["d"], "text": "d"}, {"id": token_of["e"], "text": "e"}],
        "match_length": 5,
        "source": "pool",
    }


def test_a_chunk_of_many_steps_tells_each_ones_drafts(tokenizer: Tokenizer) -> None:
    text = "日本語 abc"
    token_ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    token_texts = [detokenizer.feed((token_id,)) for token_id in token_ids]
    chunk = Chunk(
        choice_index=0,
        offset=0,
        token_ids=token_ids,
        text=text,
        num_draft_tokens=5,
        num_accepted_tokens=3,
        num_steps=2,
        steps=[
            Step(2, 1, 1, 9, DraftSource.SEQUENCE, token_texts=token_texts[:2]),
            Step(len(token_ids) - 2, 4, 2, 3, DraftSource.POOL, token_texts=token_texts[2:]),
        ],
    )
    report = json.loads(SpeculationReport(tokenizer.detokenizer()).read(chunk))
    tokens = report["tokens"]
    assert "".join(token["text"] for token in tokens) == text
    assert [token["id"] for token in tokens] == token_ids
    assert [index for index, token in enumerate(tokens) if token["accepted"]] == [0, 2, 3]
    assert (report["match_length"], report["source"]) == (3, "pool")


def test_the_usage_of_an_answer_is_the_sum_of_its_choices_and_counts_a_prompt_once() -> None:
    total = UsageTotal(has_prediction=True)
    # The second choice of the first prompt ends first: the K/V of the first one was cached for it.
    for choice_index, num_prompt_tokens, num_cached, positions, match_length in (
        (1, 10, 9, (2, 1), 3),
        (0, 10, 4, (1,), 3),
        (0, 5, 4, (), 2),
    ):
        num_accepted = sum(positions)
        usage = Usage(
            prompt_tokens=num_prompt_tokens,
            output_tokens=7,
            cached_tokens=num_cached,
            num_steps=5,
            num_drafts=2,
            num_draft_tokens=6,
            num_accepted_tokens=num_accepted,
            accepted_per_position=positions,
            resumes=1,
            by_match_length=(
                MatchAcceptance(
                    matched_ngram_length=match_length,
                    num_drafts=2,
                    num_draft_tokens=6,
                    num_accepted_tokens=num_accepted,
                ),
            ),
            num_sequence_drafts=1,
            num_pool_drafts=1,
        )
        total.add(
            Finished(choice_index=choice_index, finish_reason=FinishReason.LENGTH, usage=usage)
        )
    for num_tokens in (2, 0, 3):
        total.add_reasoning(num_tokens)
    assert total.to_json() == {
        "prompt_tokens": 15,
        "completion_tokens": 21,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 5,
            "accepted_prediction_tokens": 4,
            "rejected_prediction_tokens": 14,
        },
        "speculation": {
            "num_steps": 15,
            "num_drafts": 6,
            "num_draft_tokens": 18,
            "num_accepted_tokens": 4,
            "acceptance_rate": 4 / 18,
            "mean_acceptance_length": 1 + 4 / 6,
            "accepted_per_position": [3, 1],
            "by_match_length": [
                {
                    "matched_ngram_length": length,
                    "num_drafts": num_drafts,
                    "num_draft_tokens": 3 * num_drafts,
                    "num_accepted_tokens": num_accepted,
                }
                for length, num_drafts, num_accepted in ((2, 2, 0), (3, 4, 4))
            ],
            "num_sequence_drafts": 3,
            "num_pool_drafts": 3,
            "resumes": 3,
            "note": "1.33 tokens per step",
        },
    }
