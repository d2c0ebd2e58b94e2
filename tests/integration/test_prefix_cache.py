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
