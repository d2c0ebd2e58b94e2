"""Lossless speculation and Lossless batching (docs/acceptance.md).

The oracle is plain decoding of one request at a time, with its prompt in one chunk.
"""

import dataclasses
from collections.abc import AsyncIterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.client import Generation, GenerationRequest, SamplingParams, SpeculationParams
from tests.integration.prompts import PLAIN, mixed_requests, rename_prompts
from tests.integration.stack import EVERY_DRAFT, MODEL, Stack, running_stack, verifier_config
from tests.volume import cases
from verifier.drafts.draft_buffer import HintOutcome

BATCH = 16
MAX_ROUNDS = 20
SAMPLINGS = ("greedy", "seeded")
NEAR_TIE = 1e-4


def plain(request: GenerationRequest) -> GenerationRequest:
    return dataclasses.replace(request, speculation=PLAIN)


def seeded(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request with its own seed and sampling parameters, different for each index."""
    sampling = SamplingParams(
        temperature=(0.4, 0.8, 1.2)[index % 3],
        top_k=(0, 20)[index % 2],
        top_p=(1.0, 0.9)[index // 2 % 2],
        seed=2**63 + index,
    )
    return dataclasses.replace(request, sampling=sampling)


def token_ids(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


async def rounds_with_every_kind_of_draft(
    stack: Stack, requests: list[GenerationRequest], *, streams: int
) -> AsyncIterator[list[tuple[int, ...]]]:
    """Output of all requests, again and again until drafts were accepted, rejected and realigned:
    which hints come in time depends on how fast steps are.
    """
    realigned = stack.hints(HintOutcome.REALIGNED)
    drafted = accepted = 0
    for _ in range(MAX_ROUNDS):
        generations = await stack.generate_all(requests, streams=streams)
        drafted += sum(generation.usage.num_draft_tokens for generation in generations)
        accepted += sum(generation.usage.num_accepted_tokens for generation in generations)
        yield token_ids(generations)
        if drafted > accepted > 0 and stack.hints(HintOutcome.REALIGNED) > realigned:
            return
    pytest.fail(f"{drafted} drafted, {accepted} accepted, in {MAX_ROUNDS} rounds")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling", ["both", *(pytest.param(name, marks=pytest.mark.long) for name in SAMPLINGS)]
)
async def test_drafts_batching_and_chunking_change_no_token(dtype: str, sampling: str) -> None:
    requests = [
        seeded(request, index)
        if sampling == "seeded" or (sampling == "both" and index % 3 != 1)
        else request
        for index, request in enumerate(mixed_requests(max_new_tokens=cases(32, 48)))
    ]

    async def drafted_output_is(oracle: list[tuple[int, ...]], stack: Stack, streams: int) -> bool:
        rounds = rounds_with_every_kind_of_draft(stack, requests, streams=streams)
        return all([output == oracle async for output in rounds])

    # With `never`, steps do not wait for hints, so many hints are late and get realigned.
    whole = verifier_config(dtype=dtype, max_num_batched_tokens=2048)
    async with running_stack(verifier=whole, gateway={"draft_wait": "never"}) as stack:
        alone = await stack.generate_all([plain(r) for r in requests], streams=1)
        oracle = token_ids(alone)
        assert all(generation.usage.num_drafts == 0 for generation in alone)
        assert await drafted_output_is(oracle, stack, 1)
        assert await drafted_output_is(oracle, stack, BATCH)
        await stack.check_idle()
    # Prompts of 700 tokens and more take at least three chunks, in steps that decode others.
    chunked = verifier_config(dtype=dtype, max_num_batched_tokens=256)
    async with running_stack(verifier=chunked) as stack:
        in_chunks = await stack.generate_all([plain(r) for r in requests], streams=BATCH)
        assert token_ids(in_chunks) == oracle
        assert await drafted_output_is(oracle, stack, BATCH)
        await stack.check_idle()
    # How many drafts are verified depends on measured durations: none, perhaps.
    learning = verifier_config(dtype=dtype, speculation_depth="learned")
    async with running_stack(verifier=learning) as stack:
        assert token_ids(await stack.generate_all(requests, streams=BATCH)) == oracle


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_prompts", [32, pytest.param(200, marks=pytest.mark.long)])
async def test_greedy_output_equals_transformers_except_at_near_ties(
    num_prompts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    max_new_tokens = 32
    prompts = rename_prompts(num_prompts, seed=2026)
    async with running_stack(
        verifier=verifier_config(dtype="float32"), gateway=EVERY_DRAFT
    ) as stack:
        requests = [GenerationRequest(prompt=p, max_new_tokens=max_new_tokens) for p in prompts]
        generations = await stack.generate_all(requests, streams=BATCH)
        assert sum(g.usage.num_accepted_tokens for g in generations) > 0
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    divergences = []
    for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
        actual = [*generation.token_ids]
        assert len(actual) == max_new_tokens or actual[-1] == model.config.eos_token_id
        # What transformers would choose after the same tokens.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + actual])).logits[0, len(prompt) - 1 : -1]
        differing = (logits.argmax(dim=-1) != torch.tensor(actual)).nonzero()
        if len(differing):
            place = int(differing[0])
            best, second = logits[place].topk(2).values.tolist()
            divergences.append((index, place, best - second))
    with capsys.disabled():
        for index, place, gap in divergences:
            print(f"\nprompt {index} diverges at output token {place}, a gap of {gap:.2g}")
    assert [d for d in divergences if d[2] > NEAR_TIE] == []


async def test_a_prediction_saves_steps_and_changes_no_token() -> None:
    # So short that little of the output is in it.
    request = GenerationRequest(
        prompt=rename_prompts(1)[0][-12:], max_new_tokens=64, ignore_eos=True
    )
    async with running_stack(gateway=EVERY_DRAFT) as stack:
        expected = await stack.generate(plain(request))
        middle = len(expected.text) // 2
        nearly = expected.text[:middle] + " other " + expected.text[middle:]
        num_steps = []
        for prediction in (expected.text, nearly, "nothing of that", ""):
            speculation = SpeculationParams(num_speculative_tokens=15, prediction=prediction)
            made = await stack.generate(dataclasses.replace(request, speculation=speculation))
            assert made.token_ids == expected.token_ids
            num_steps.append(made.usage.num_steps)
        await stack.check_idle()
    exact, near, other, none = num_steps
    assert exact <= 64 / 16 + 2
    assert exact < near < none - 3
    assert other <= none + 2
