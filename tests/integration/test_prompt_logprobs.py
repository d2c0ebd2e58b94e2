"""Prompt logprobs through all services; part of Every sampling parameter (docs/acceptance.md)."""

import dataclasses

import pytest
import torch

from tandem.client import Generation, GenerationRequest, SamplingParams
from tests.integration.prompts import PLAIN, prompt_of_length
from tests.integration.stack import EVERY_DRAFT, MODEL, Stack, running_stack, verifier_config
from verifier.transformers_model.checkpoint import load_checkpoint, reference_logits

# Prompts shorter and longer than a step.
LENGTHS = [1, 40, 200, 530]
PROMPTS = [prompt_of_length(length, seed=length) for length in LENGTHS]


def requests() -> list[GenerationRequest]:
    made = [
        GenerationRequest(
            prompt=prompt, max_new_tokens=16, sampling=SamplingParams(prompt_logprobs=2, logprobs=1)
        )
        for prompt in PROMPTS
    ]
    processed = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, prompt_logprobs=1)
    made.append(dataclasses.replace(made[2], sampling=processed))
    # A request without prompt logprobs, to show that others' change nothing for it.
    return [*made, dataclasses.replace(made[2], sampling=SamplingParams())]


async def generate(stack: Stack, *, plain: bool, streams: int) -> list[Generation]:
    chosen = requests()
    if plain:
        chosen = [dataclasses.replace(request, speculation=PLAIN) for request in chosen]
    results = await stack.generate_all(chosen, streams=streams)
    await stack.check_idle()
    return results


@pytest.mark.timeout(300)
async def test_prompt_logprobs_are_the_models_and_the_same_alone_and_in_chunks_beside_others() -> (
    None
):
    config = verifier_config(dtype="float32", max_num_batched_tokens=72)
    async with running_stack(verifier=config, gateway=EVERY_DRAFT) as stack:
        alone = await generate(stack, plain=True, streams=1)
        beside = await generate(stack, plain=False, streams=len(alone))
    assert sum(g.usage.num_accepted_tokens for g in beside) > 0
    for one, other in zip(alone, beside, strict=True):
        assert one.token_ids == other.token_ids
        assert one.choices[0].prompt_logprobs == other.choices[0].prompt_logprobs
    assert alone[-1].choices[0].prompt_logprobs == ()
    # Of float32 arithmetic, which errs by up to 2e-4 here, depending on the processor.
    model = load_checkpoint(MODEL, dtype="float32", device=torch.device("cpu")).model.double()
    for prompt, result in zip(PROMPTS, alone, strict=False):
        logprobs = result.choices[0].prompt_logprobs
        assert len(logprobs) == len(prompt)
        assert (logprobs[0].rank, logprobs[0].top) == (0, ())
        expected = torch.log_softmax(reference_logits(model, prompt).double(), dim=-1)
        for token_id, logprob, row in zip(prompt[1:], logprobs[1:], expected, strict=False):
            assert logprob.token_id == token_id
            for each in (logprob, *logprob.top):
                assert each.logprob == pytest.approx(float(row[each.token_id]), abs=3e-4, rel=2e-5)
            assert len(logprob.top) == 2
