"""Drafter loss (docs/acceptance.md): a lost drafter costs no token, and drafts after its return."""

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tandem.client import Chunk, GenerationRequest
from tests.integration.pausable_model import PausableModel
from tests.integration.prompts import PLAIN, prompt_of_length
from tests.integration.stack import REPOSITORY, running_stack, wait_until
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig

MAX_NEW_TOKENS = 600


@contextlib.asynccontextmanager
async def drafter_process(listen: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "drafter", "--listen", listen, "--metrics-listen", ""),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield process, line.strip().removeprefix("ready grpc=")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@dataclass(slots=True)
class Phase:
    """Counts that the client received while the drafter was up, gone, or back."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@pytest.mark.timeout(400)
async def test_a_killed_drafter_costs_no_token_and_drafts_again_after_its_return() -> None:
    models: list[PausableModel] = []

    def load(config: VerifierConfig) -> LoadedModel:
        loaded = load_model(config)
        models.append(PausableModel(loaded.model))
        return dataclasses.replace(loaded, model=models[-1])

    request = GenerationRequest(
        prompt=prompt_of_length(600, seed=1), max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True
    )
    async with contextlib.AsyncExitStack() as exits:
        first, address = await exits.enter_async_context(drafter_process("127.0.0.1:0"))
        stack = await exits.enter_async_context(
            running_stack(load=load, gateway={"drafters": [address]})
        )
        [model] = models

        def num_drafters() -> float:
            return stack.metric("gateway", "tandem_peers_connected", kind="drafter")

        expected = await stack.generate(dataclasses.replace(request, speculation=PLAIN))

        output: list[int] = []
        up, gone, back = Phase(), Phase(), Phase()
        phase = up
        events = await exits.enter_async_context(contextlib.aclosing(stack.client.stream(request)))
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            output += event.token_ids
            phase.num_steps += event.num_steps
            phase.num_draft_tokens += event.num_draft_tokens
            phase.num_accepted_tokens += event.num_accepted_tokens
            if phase is up and up.num_accepted_tokens > 20:
                first.kill()
                await first.wait()
                await wait_until(lambda: num_drafters() == 0)
                phase = gone
            elif phase is gone and gone.num_steps > 40:
                model.may_run.clear()
                await exits.enter_async_context(drafter_process(address))
                # Its engine reports the drafter between two steps: the text must outlast that.
                model.pause_s = 0.05
                model.may_run.set()
                await wait_until(lambda: num_drafters() == 1)
                model.pause_s = 0.0
                phase = back
        assert up.num_accepted_tokens > 0
        assert gone.num_draft_tokens < gone.num_steps  # the buffered drafts, then none
        assert back.num_accepted_tokens > 0
        assert tuple(output) == expected.token_ids
        assert len(output) == MAX_NEW_TOKENS
        await stack.check_idle()


@pytest.mark.timeout(400)
async def test_sequences_draft_from_another_drafter_once_theirs_is_gone() -> None:
    models: list[PausableModel] = []

    def load(config: VerifierConfig) -> LoadedModel:
        loaded = load_model(config)
        models.append(PausableModel(loaded.model))
        return dataclasses.replace(loaded, model=models[-1])

    request = GenerationRequest(
        prompt=prompt_of_length(600, seed=1), max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True
    )
    async with contextlib.AsyncExitStack() as exits:
        processes = {}
        for _ in range(2):
            process, address = await exits.enter_async_context(drafter_process("127.0.0.1:0"))
            processes[address] = process
        stack = await exits.enter_async_context(
            running_stack(load=load, gateway={"drafters": list(processes)})
        )
        [model] = models
        expected = await stack.generate(dataclasses.replace(request, speculation=PLAIN))

        output: list[int] = []
        before, after = Phase(), Phase()
        phase = before
        model.pause_s = 0.01
        events = await exits.enter_async_context(contextlib.aclosing(stack.client.stream(request)))
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            output += event.token_ids
            phase.num_accepted_tokens += event.num_accepted_tokens
            if phase is before and before.num_accepted_tokens > 20:
                [sequence] = stack.gateway.coordinator._sequences._by_id.values()
                lost = sequence.drafter
                processes[lost].kill()
                await wait_until(lambda: sequence.drafter != lost)  # noqa: B023
                [other] = set(processes) - {lost}
                assert sequence.drafter == other
                phase = after
        assert after.num_accepted_tokens > before.num_accepted_tokens
        assert tuple(output) == expected.token_ids
        await stack.check_idle()


async def test_without_a_drafter_requests_are_served_without_drafts() -> None:
    prompt = prompt_of_length(200, seed=2)
    request = GenerationRequest(prompt=prompt, max_new_tokens=20)
    async with running_stack(gateway={"drafters": []}) as stack:
        generation = await stack.generate(request)
        assert generation.usage.num_drafts == 0
        assert generation.usage.output_tokens > 0
        await stack.check_idle()


async def test_with_an_unreachable_drafter_requests_are_served_without_drafts() -> None:
    async with running_stack(gateway={"drafters": ["127.0.0.1:1"]}) as stack:
        prompt = prompt_of_length(200, seed=2)
        generation = await stack.generate(GenerationRequest(prompt=prompt, max_new_tokens=20))
        assert generation.usage.num_drafts == 0
        assert generation.usage.output_tokens > 0
        await stack.check_idle()
