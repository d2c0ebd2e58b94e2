"""Isolated tenants (docs/acceptance.md): pools through all services."""

import hashlib
import json
from pathlib import Path

from tandem.client import AsyncTandemClient, Generation, GenerationRequest, SpeculationParams
from tests.integration.prompts import rename_prompts
from tests.integration.stack import EVERY_DRAFT, Stack, running_stack, wait_until

DRAFTS_FROM_POOLS = {"outcome": "draft", "source": "pool"}


async def generate_as(tenant: str, stack: Stack, prompt: list[int]) -> tuple[Generation, float]:
    """Returns the generation, and how many of its drafts came from a pool."""
    name = "tandem_drafter_proposals_total"
    before = stack.metric("drafter", name, **DRAFTS_FROM_POOLS)
    num_texts = stack.drafter.pools.num_texts
    address = stack.gateway.server.address
    async with AsyncTandemClient(address, token=f"token-of-{tenant}") as client:
        generation = await client.generate(
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=40,
                ignore_eos=True,
                speculation=SpeculationParams(pool="shared", tie="longest"),
            )
        )
    await wait_until(lambda: stack.drafter.pools.num_texts == num_texts + 1)
    await stack.drafter.pool_keeper.settle()
    return generation, stack.metric("drafter", name, **DRAFTS_FROM_POOLS) - before


async def test_two_tenants_never_draft_from_each_others_text(tmp_path: Path) -> None:
    prompt = rename_prompts(1, seed=3)[0][:12]
    digests = {each: hashlib.sha256(f"token-of-{each}".encode()).hexdigest() for each in "ab"}
    clients = tmp_path / "clients.yaml"
    clients.write_text(
        json.dumps(
            {
                "tenants": {
                    tenant: {"clients": [{"token_sha256": digest}]}
                    for tenant, digest in digests.items()
                }
            }
        )
    )
    async with running_stack(gateway={"clients": clients, **EVERY_DRAFT}) as stack:
        first, _ = await generate_as("a", stack, prompt)
        # The same text and pool name as another tenant, whose pool is empty.
        foreign, num_foreign = await generate_as("b", stack, prompt)
        again, num_own = await generate_as("a", stack, prompt)
        pools = set(stack.drafter.pools.pool_ids())
    assert num_foreign == 0
    assert num_own > 0, "a tenant drafts from its own text"
    assert first.token_ids == foreign.token_ids == again.token_ids
    assert pools == {"1:a/shared", "1:b/shared"}
