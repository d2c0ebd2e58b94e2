"""Drafter loss (docs/acceptance.md): a lost drafter costs no token, and drafts after its return."""

import contextlib
import dataclasses

import pytest

from tandem.client import Chunk, GenerationRequest, SpeculationParams
from tandem.free_ports import free_port
from tests.integration.pausable_model import PausableLoad
from tests.integration.prompts import PLAIN, prompt_of_length
from tests.integration.stack import EVERY_DRAFT, running_stack, wait_until
from tests.module_process import drafter_at

MAX_NEW_TOKENS = 600


# The engine reports a drafter's loss and return between two steps, so the text must not end before:
# so long is a pause before each step while the test waits for a report, in seconds.
PAUSE_S = 0.3


@pytest.mark.timeout(400)
async def test_a_killed_drafter_costs_no_token_and_drafts_again_after_its_return() -> None:
    load = PausableLoad()
    request = GenerationRequest(
        prompt=prompt_of_length(600, seed=1), max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True
    )
    async with contextlib.AsyncExitStack() as exits:
        listen = f"127.0.0.1:{free_port()}"
        first, address = await exits.enter_async_context(drafter_at(listen))
        stack = await exits.enter_async_context(
            running_stack(load=load, gateway={"drafters": [address], **EVERY_DRAFT})
        )
        model = load.model

        async def wait_for_drafters(count: int) -> None:
            model.pause_s = PAUSE_S
            await wait_until(
                lambda: stack.metric("gateway", "tandem_peers_connected", kind="drafter") == count
            )
            model.pause_s = 0.0

        expected = await stack.generate(dataclasses.replace(request, speculation=PLAIN))

        output: list[int] = []
        # What the client received before the drafter's loss; its last steps in a row without
        # drafts after it; what it received after the drafter's return.
        num_accepted_before = num_plain_steps = num_accepted_after = 0
        phase = "before"
        model.pause_s = 0.02
        events = await exits.enter_async_context(contextlib.aclosing(stack.client.stream(request)))
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            output += event.token_ids
            if phase == "before":
                num_accepted_before += event.num_accepted_tokens
                if num_accepted_before > 20:
                    first.kill()
                    await first.wait()
                    await wait_for_drafters(0)
                    model.pause_s = 0.02
                    phase = "without"
            elif phase == "without":
                num_plain_steps = 0 if event.num_draft_tokens else num_plain_steps + event.num_steps
                if num_plain_steps > 10:
                    model.may_run.clear()
                    await exits.enter_async_context(drafter_at(address))
                    model.may_run.set()
                    await wait_for_drafters(1)
                    phase = "after"
            else:
                num_accepted_after += event.num_accepted_tokens
        assert phase == "after"
        assert num_accepted_after > 0
        assert tuple(output) == expected.token_ids
        assert len(output) == MAX_NEW_TOKENS
        await stack.check_idle()


@pytest.mark.timeout(400)
async def test_sequences_draft_from_another_drafter_once_theirs_is_gone() -> None:
    load = PausableLoad()
    request = GenerationRequest(
        prompt=prompt_of_length(600, seed=1),
        max_new_tokens=MAX_NEW_TOKENS,
        ignore_eos=True,
        # So a hint holds few drafts: those of the lost drafter are soon used up.
        speculation=SpeculationParams(num_speculative_tokens=3),
    )
    async with contextlib.AsyncExitStack() as exits:
        processes = {}
        for _ in range(2):
            process, address = await exits.enter_async_context(drafter_at("127.0.0.1:0"))
            processes[address] = process
        stack = await exits.enter_async_context(
            running_stack(load=load, gateway={"drafters": list(processes), **EVERY_DRAFT})
        )
        expected = await stack.generate(dataclasses.replace(request, speculation=PLAIN))

        output: list[int] = []
        num_accepted_before = num_accepted_after = 0
        lost = None
        load.model.pause_s = 0.02
        events = await exits.enter_async_context(contextlib.aclosing(stack.client.stream(request)))
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            output += event.token_ids
            if lost is not None:
                num_accepted_after += event.num_accepted_tokens
                continue
            num_accepted_before += event.num_accepted_tokens
            if num_accepted_before > 20:
                [sequence] = stack.gateway.coordinator._sequences._by_id.values()
                lost = sequence.drafter
                load.model.pause_s = PAUSE_S
                processes[lost].kill()
                await wait_until(lambda: sequence.drafter != lost)  # noqa: B023
                load.model.pause_s = 0.0
                [other] = set(processes) - {lost}
                assert sequence.drafter == other
        assert num_accepted_after > num_accepted_before
        assert tuple(output) == expected.token_ids
        await stack.check_idle()


async def test_with_an_unreachable_drafter_requests_are_served_without_drafts() -> None:
    async with running_stack(gateway={"drafters": ["127.0.0.1:1"]}) as stack:
        prompt = prompt_of_length(200, seed=2)
        generation = await stack.generate(GenerationRequest(prompt=prompt, max_new_tokens=20))
        assert generation.usage.num_drafts == 0
        assert generation.usage.output_tokens > 0
        await stack.check_idle()
