"""Invisible caching (docs/acceptance.md): prefix cache and preemption change no token."""

import dataclasses

from tandem.client import GenerationRequest
from tests.integration.prompts import prompt_of_length
from tests.integration.stack import running_stack, verifier_config


async def test_a_repeated_prefix_is_cached_and_counted_and_changes_no_token() -> None:
    prompt = prompt_of_length(330, seed=5)
    request = GenerationRequest(prompt=prompt, max_new_tokens=24, ignore_eos=True)
    async with running_stack(verifier=verifier_config(dtype="float32")) as stack:
        first = await stack.generate(request)
        again = await stack.generate(dataclasses.replace(request, priority=3))
        longer = [*prompt, *first.token_ids]
        grown = await stack.generate(dataclasses.replace(request, prompt=longer))
        await stack.check_idle()
        queries = stack.metric("verifier", "tandem_prefix_cache_queries_total")
        hits = stack.metric("verifier", "tandem_prefix_cache_hits_total")
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == 320
    assert grown.usage.cached_tokens >= 336, "output is cached too"
    assert again.token_ids == first.token_ids
    assert (queries, hits) == (2 * 330 + 354, 320 + grown.usage.cached_tokens)


async def test_without_the_cache_every_prompt_is_computed_whole() -> None:
    request = GenerationRequest(prompt=prompt_of_length(100, seed=5), max_new_tokens=2)
    async with running_stack(verifier=verifier_config(prefix_cache=False)) as stack:
        generations = [await stack.generate(request) for _ in range(2)]
        queries = stack.metric("verifier", "tandem_prefix_cache_queries_total")
    assert [generation.usage.cached_tokens for generation in generations] == [0, 0]
    assert queries == 0


async def test_preempted_requests_give_the_same_tokens_as_alone() -> None:
    requests = [
        GenerationRequest(
            prompt=prompt_of_length(60 + 9 * i, seed=i),
            max_new_tokens=64,
            ignore_eos=True,
            priority=i % 3,
        )
        for i in range(8)
    ]
    async with running_stack(verifier=verifier_config(dtype="float32")) as stack:
        alone = [await stack.generate(request) for request in requests]
    tight = verifier_config(dtype="float32", num_kv_blocks=32, max_model_len=512)
    async with running_stack(verifier=tight) as stack:
        together = await stack.generate_all(requests, streams=8)
        await stack.check_idle()
        num_preemptions = stack.metric("verifier", "tandem_preemptions_total")
    assert num_preemptions > 0
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
