"""No burst of messages blocks the event loop: each turn does a small part of the work.

Only the tasks and callbacks of gateway and servicekit count: scripted peers and clients run on the
same loop.
"""

import asyncio
from typing import Any

import pytest

import gateway
import servicekit
from tandem.v1 import gateway_pb2, sampling_pb2, verifier_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import GenerateCall, RunningGateway, StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.work import MAX_WORK, Turns, counted

pytestmark = pytest.mark.stand_in

OWN_FOLDERS = (gateway.__path__[0], servicekit.__path__[0])
ONE, TWO = "10.0.0.1:50051", "10.0.0.2:50051"


def is_own(handle: asyncio.Handle) -> bool:
    """Whether a callback runs code of the gateway."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        code = getattr(owner.get_coro(), "cr_code", None)
        return code is not None and code.co_filename.startswith(OWN_FOLDERS)
    return type(owner).__module__.startswith(("gateway.", "servicekit."))


def check(turns: Turns) -> None:
    assert 0 < turns.most < min(MAX_WORK, turns.total / 10)


async def open_many(
    running: RunningGateway, verifier: ScriptedVerifier, num_calls: int, **fields: object
) -> list[GenerateCall]:
    calls = [running.call(1, 2, 3, n=16, **fields) for _ in range(num_calls)]
    await verifier.until(lambda: len(verifier.commands("open")) == 16 * num_calls)
    return calls


async def end(calls: list[GenerateCall]) -> None:
    for call in calls:
        call.cancel()


async def test_a_step_of_many_sequences(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.limits["max_num_speculative_tokens"] = 31
    running = await start_gateway(verifiers=[verifier.address], drafters=[ONE, TWO])
    calls = await open_many(running, verifier, 64)
    opened = [command.sequence_id for command in verifier.commands("open")]
    with counted(is_own) as turns:
        for step in range(3):
            verifier.send(
                *(
                    verifier.decided(each, 3 + 32 * step, [1000] * 32, drafts=31, accepted=31)
                    for each in opened
                )
            )
        num_tokens = 3 * 32 * len(opened)
        await until(lambda: running.sample("tandem_generation_tokens_total") == num_tokens)
    check(turns)
    await end(calls)


async def test_many_sequences_that_move_to_another_drafter(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[ONE, TWO], max_concurrent_requests=4096
    )
    calls = await open_many(running, verifier, 256)
    num_moved = sum(each.drafter_address == ONE for each in verifier.commands("open"))
    with counted(is_own) as turns:
        verifier.send(
            verifier.drafter_status(ONE, verifier_pb2.DrafterStatus.STATE_DOWN),
        )
        await verifier.nth("update", num_moved - 1)
    assert num_moved > 1000
    check(turns)
    await end(calls)


async def test_a_message_full_of_logprobs(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifier = await start_verifier(max_model_len=1 << 16)
    running = await start_gateway(verifiers=[verifier.address])
    num_tokens = 6_000
    sampling = sampling_pb2.SamplingParams(prompt_logprobs=20, logprobs=20)
    call = running.call(*([1] * num_tokens), sampling=sampling)
    opened = await verifier.nth("open", 0)
    top = [sampling_pb2.TokenLogprob(token_id=i, logprob=-1.5, rank=i + 1) for i in range(20)]
    logprob = sampling_pb2.TokenLogprob(token_id=7, logprob=-0.5, rank=1, top=top)
    # As large as a verifier's messages are.
    num_at_once = (128 << 10) // (logprob.ByteSize() + 3)
    with counted(is_own) as turns:
        for first in range(1, num_tokens, num_at_once):
            scored = verifier_pb2.PromptScored(
                sequence_id=opened.sequence_id,
                base_length=first,
                logprobs=[logprob] * min(num_at_once, num_tokens - first),
            )
            verifier.send(verifier_pb2.Event(prompt_scored=scored))
        event = verifier.decided(opened.sequence_id, num_tokens, [7])
        event.decided.logprobs.append(logprob)
        verifier.send(event)
        async with asyncio.timeout(60):
            num_received = 0
            while num_received < num_tokens:
                response = await call.read()
                assert isinstance(response, gateway_pb2.GenerateResponse)
                num_received += len(response.chunk.prompt_logprobs)
    check(turns)
    call.cancel()


async def test_a_burst_of_a_thousand_opens(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[ONE, TWO])
    sampling = sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0))
    with counted(is_own) as turns:
        calls = await open_many(running, verifier, 63, sampling=sampling)
        await end(calls)
        await running.until_idle()
    check(turns)
