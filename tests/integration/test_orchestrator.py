"""Drafts of one's own (docs/acceptance.md): the orchestrator examples against a real verifier.

The oracle is plain decoding.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.workloads import rename_tasks
from examples import orchestrator, orchestrator_score
from tandem.client import GenerationRequest, SpeculationParams
from tests.integration.stack import MODEL, REPOSITORY, Stack, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = REPOSITORY / "examples"
BLOCK_SIZE = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack
        await stack.check_idle()


async def plain(stack: Stack, prompt: list[int], max_new_tokens: int) -> list[int]:
    request = GenerationRequest(
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        speculation=SpeculationParams(enabled=False),
    )
    return list((await stack.generate(request)).token_ids)


def some_prompt() -> list[int]:
    [*_, task] = rename_tasks(MODEL, 3)
    return list(task.prompt_token_ids)


async def test_the_examples_drafts_save_steps_and_change_no_token(stack: Stack) -> None:
    prompt = some_prompt()
    output, num_steps = await orchestrator.generate(stack.verifier.server.address, prompt, 100)
    assert output == await plain(stack, prompt, 100)
    assert num_steps < len(output) / 2


async def test_every_step_waits_for_its_draft(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drafts are always right here: a step that did not wait for its draft would add a step.
    prompt = some_prompt()
    expected = await plain(stack, prompt, 64)
    whole = prompt + expected
    monkeypatch.setattr(
        orchestrator, "propose", lambda token_ids: whole[len(token_ids) : len(token_ids) + 6]
    )
    output, num_steps = await orchestrator.generate(stack.verifier.server.address, prompt, 64)
    assert output == expected
    assert num_steps == 1 + 63 // 7


async def test_a_refused_prompt_names_the_field(stack: Stack) -> None:
    with pytest.raises(SystemExit, match="token_ids: "):
        await orchestrator.generate(stack.verifier.server.address, [], 8)


@pytest.mark.parametrize("name", ["orchestrator", "orchestrator_score"])
async def test_the_command_prints_text_and_steps(stack: Stack, name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / f"{name}.py"), stack.verifier.server.address),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    *text, summary = out.decode().splitlines()
    assert text
    assert re.fullmatch(r"# \d+ tokens in \d+ (steps|calls)", summary)


async def test_score_calls_with_a_growing_prompt_reuse_cached_blocks(stack: Stack) -> None:
    prompt = some_prompt()
    queries_and_hits = [cache_counts(stack)]
    output, num_calls = await orchestrator_score.generate(
        stack.verifier.server.address, prompt, 100
    )
    queries_and_hits.append(cache_counts(stack))
    assert output == await plain(stack, prompt, 100)
    assert num_calls < len(output) / 2
    # Every call except the first finds the whole blocks of the call before it.
    num_hits = queries_and_hits[1][1] - queries_and_hits[0][1]
    assert num_hits >= (num_calls - 1) * ((len(prompt) - 1) // BLOCK_SIZE) * BLOCK_SIZE


async def test_a_request_that_continues_an_earlier_one_reuses_its_blocks(
    stack: Stack,
) -> None:
    prompt = some_prompt()
    output = await plain(stack, prompt, 40)
    request = GenerationRequest(prompt=prompt + output, max_new_tokens=8)
    usage = (await stack.generate(request)).usage
    # A token's K/V is computed by the step after it, so the last token of the request before has
    # none.
    num_computed = len(prompt) + len(output) - 1
    assert usage.cached_tokens >= num_computed // BLOCK_SIZE * BLOCK_SIZE


def cache_counts(stack: Stack) -> tuple[float, float]:
    """Returns the tokens looked up in the prefix cache so far, and those found."""
    return (
        stack.metric("verifier", "tandem_prefix_cache_queries_total"),
        stack.metric("verifier", "tandem_prefix_cache_hits_total"),
    )
