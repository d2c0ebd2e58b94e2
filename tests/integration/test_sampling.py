"""Every sampling parameter (docs/acceptance.md): the same with and without drafts."""

import dataclasses

import pytest

from tandem.client import Generation, GenerationRequest, SamplingParams
from tests.integration.prompts import PLAIN, prompt_of_length
from tests.integration.stack import EVERY_DRAFT, Stack, running_stack, verifier_config

PARAMETERS = {
    "repetition": SamplingParams(repetition_penalty=1.2),
    "frequency": SamplingParams(frequency_penalty=0.4, logprobs=3),
    "presence": SamplingParams(presence_penalty=0.8, temperature=0.7, seed=1),
    "bias": SamplingParams(logit_bias={20: 4.0, 30: -100.0}, temperature=1.0, seed=2, logprobs=0),
    "min_p": SamplingParams(min_p=0.2, temperature=1.3, seed=3, logprobs=2),
    "min_new_tokens": SamplingParams(min_new_tokens=30),
    "raw logprobs": SamplingParams(
        temperature=0.5, seed=4, top_k=5, logprobs=4, logprobs_mode="raw"
    ),
    "all": SamplingParams(
        repetition_penalty=1.05,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        seed=5,
        logprobs=2,
    ),
}


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=prompt_of_length(200 + 20 * index, seed=index),
            max_new_tokens=40,
            sampling=sampling,
        )
        for index, sampling in enumerate(PARAMETERS.values())
    ]


async def generate(stack: Stack, *, plain: bool, streams: int) -> list[Generation]:
    chosen = requests()
    if plain:
        chosen = [dataclasses.replace(request, speculation=PLAIN) for request in chosen]
    return await stack.generate_all(chosen, streams=streams)


@pytest.mark.timeout(300)
async def test_tokens_and_logprobs_are_the_same_with_and_without_drafts() -> None:
    async with running_stack(
        verifier=verifier_config(dtype="float32"), gateway=EVERY_DRAFT
    ) as stack:
        oracle = await generate(stack, plain=True, streams=1)
        drafted = await generate(stack, plain=False, streams=len(PARAMETERS))
        assert [g.token_ids for g in drafted] == [g.token_ids for g in oracle]
        assert sum(g.usage.num_accepted_tokens for g in drafted) > 0
        for sampling, alone, batched in zip(PARAMETERS.values(), oracle, drafted, strict=True):
            expected = 0 if sampling.logprobs is None else len(alone.token_ids)
            assert len(alone.choices[0].logprobs) == expected
            assert alone.choices[0].logprobs == batched.choices[0].logprobs
            for token_id, logprob in zip(alone.token_ids, alone.choices[0].logprobs, strict=False):
                assert logprob.token_id == token_id
                assert len(logprob.top) == sampling.logprobs
                assert logprob.logprob <= 0
        await stack.check_idle()
