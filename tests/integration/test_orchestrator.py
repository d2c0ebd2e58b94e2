"""The orchestrator examples against a real verifier, with plain decoding as the oracle."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from benchmarks.workloads import rename_tasks
from examples import orchestrator
from tandem.client import GenerationRequest, SpeculationParams
from tests.integration.stack import MODEL, REPOSITORY, Stack, running_stack

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
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


async def test_its_drafts_save_steps_and_change_nothing(stack: Stack) -> None:
    prompt = some_prompt()
    output, num_steps = await orchestrator.generate(stack.verifier.server.address, prompt, 100)
    assert output == await plain(stack, prompt, 100)
    assert num_steps < len(output) / 2


async def test_every_step_waits_for_its_draft(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drafts that are always right: were any step not to wait, there would be more steps.
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


async def test_the_command_prints_text_and_steps(stack: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / "orchestrator.py"), stack.verifier.server.address),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    *text, summary = out.decode().splitlines()
    assert text
    assert re.fullmatch(r"# \d+ tokens in \d+ steps", summary)


def test_it_is_short() -> None:
    assert len((EXAMPLES / "orchestrator.py").read_text().splitlines()) < 60
