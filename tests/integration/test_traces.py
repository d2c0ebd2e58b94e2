"""Consistent traces (docs/acceptance.md): a trace adds up to the output and the usage."""

import asyncio
import contextlib

from tandem.client import (
    DraftSource,
    Generation,
    GenerationRequest,
    MatchAcceptance,
    SpeculationParams,
    StepTrace,
    Traced,
)
from tandem.generation import EventCollector
from tests.integration.prompts import rename_prompts
from tests.integration.stack import EVERY_DRAFT, Stack, running_stack, verifier_config, wait_until


async def trace(stack: Stack, request: GenerationRequest) -> tuple[Generation, list[StepTrace]]:
    collector = EventCollector()
    steps: list[StepTrace] = []
    async with contextlib.aclosing(stack.client.stream(request)) as events:
        async for event in events:
            collector.add(event)
            if isinstance(event, Traced):
                steps.append(event.step)
    return collector.generation(), steps


def check_sums(prompt: list[int], generation: Generation, steps: list[StepTrace]) -> None:
    """Asserts that output and usage follow from the trace.

    A proposal may serve several steps: a step's draft belongs to the last one that contains it.
    """
    usage = generation.usage
    output = [token_id for step in steps for token_id in step.output_token_ids]
    assert output == list(generation.token_ids)
    text = prompt + output
    sampled = [step for step in steps if step.output_token_ids]
    drafted = [step for step in sampled if step.draft_token_ids]
    assert usage.num_steps == len(sampled)
    assert usage.num_drafts == len(drafted)
    assert usage.num_draft_tokens == sum(len(step.draft_token_ids) for step in drafted)
    assert usage.num_accepted_tokens == sum(step.num_accepted_tokens for step in drafted)
    longest = max((len(step.output_token_ids) for step in drafted), default=None)
    assert usage.max_acceptance_length == longest
    counts: dict[int, list[int]] = {}
    num_of = {DraftSource.SEQUENCE: 0, DraftSource.POOL: 0, None: 0}
    proposals = [proposal for step in steps for proposal in step.proposals]
    for step in drafted:
        before = step.context_length_after - len(step.output_token_ids)
        known = [p for s in steps if s.step_id <= step.step_id for p in s.proposals]
        proposal = next(
            p
            for p in reversed(known)
            if list(p.token_ids[: before - p.base_length]) == text[p.base_length : before]
            and p.token_ids[before - p.base_length :][: len(step.draft_token_ids)]
            == step.draft_token_ids
        )
        match_length = proposal.matched_ngram_length + before - proposal.base_length
        sums = counts.setdefault(min(match_length, 64), [0, 0, 0])
        sums[0] += 1
        sums[1] += len(step.draft_token_ids)
        sums[2] += step.num_accepted_tokens
        num_of[proposal.source] += 1
    assert proposals
    assert usage.by_match_length == tuple(
        MatchAcceptance(
            matched_ngram_length=length,
            num_drafts=sums[0],
            num_draft_tokens=sums[1],
            num_accepted_tokens=sums[2],
        )
        for length, sums in sorted(counts.items())
    )
    assert usage.num_sequence_drafts == num_of[DraftSource.SEQUENCE]
    assert usage.num_pool_drafts == num_of[DraftSource.POOL]
    assert num_of[None] == 0


async def test_a_trace_adds_up_to_the_usage_and_names_the_pool() -> None:
    prompt = rename_prompts(1, seed=3)[0][:12]
    request = GenerationRequest(
        prompt=prompt,
        max_new_tokens=40,
        ignore_eos=True,
        trace=True,
        speculation=SpeculationParams(pool="shared", tie="longest"),
    )
    async with running_stack(
        verifier=verifier_config(allow_trace=True),
        gateway={"allow_trace": True, **EVERY_DRAFT},
    ) as stack:
        first, its_steps = await trace(stack, request)
        await wait_until(lambda: stack.drafter.pools.num_texts == 1)
        await stack.drafter.pool_keeper.settle()
        second, their_steps = await trace(stack, request)
        await stack.check_idle()
    check_sums(prompt, first, its_steps)
    check_sums(prompt, second, their_steps)
    assert first.usage.num_pool_drafts == 0
    assert second.usage.num_pool_drafts > 0
    assert first.token_ids == second.token_ids


async def test_tracing_ends_at_a_stop_string_and_changes_no_other_request() -> None:
    prompts = rename_prompts(3, seed=5)
    async with running_stack(
        verifier=verifier_config(allow_trace=True),
        gateway={"allow_trace": True, **EVERY_DRAFT},
    ) as stack:
        plain = [
            await stack.generate(GenerationRequest(prompt=prompt, max_new_tokens=60))
            for prompt in prompts
        ]
        stop = plain[0].text[10:13]
        requests = [
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=60,
                trace=index < 2,
                stop_sequences=[stop] if index == 0 else [],
            )
            for index, prompt in enumerate(prompts)
        ]
        stopped, traced, untraced = await asyncio.gather(
            *(trace(stack, request) for request in requests)
        )
        await stack.check_idle()
    generation, steps = stopped
    assert generation.text == plain[0].text[: plain[0].text.index(stop)]
    assert len([step for step in steps if step.output_token_ids]) == generation.usage.num_steps
    traced_ids = [token_id for step in steps for token_id in step.output_token_ids]
    assert traced_ids[: len(generation.token_ids)] == list(generation.token_ids)
    check_sums(prompts[1], *traced)
    assert traced[0].token_ids == plain[1].token_ids
    assert untraced[0].token_ids == plain[2].token_ids
    assert untraced[1] == []
