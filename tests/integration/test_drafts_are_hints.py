"""Drafts are hints (docs/acceptance.md): no draft changes output or fails a request."""

import random
from collections.abc import AsyncIterator

import grpc
import pytest

from tandem.client import GenerationRequest
from tandem.v1 import drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.drills.lying_drafter import LyingDrafter
from tests.integration.prompts import PLAIN, rename_prompts
from tests.integration.stack import Stack, running_stack
from verifier.drafts.draft_buffer import HintOutcome

NUM_PROMPTS, MAX_NEW_TOKENS = 12, 40
MAX_ROUNDS = 20


@pytest.fixture
async def liar() -> AsyncIterator[tuple[LyingDrafter, str]]:
    servicer = LyingDrafter()
    server = grpc.aio.server()
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def oracle(stack: Stack, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    requests = [
        GenerationRequest(prompt=prompt, max_new_tokens=MAX_NEW_TOKENS, speculation=PLAIN)
        for prompt in prompts
    ]
    return [g.token_ids for g in await stack.generate_all(requests, streams=NUM_PROMPTS)]


@pytest.mark.stand_in
async def test_a_lying_drafter_changes_no_output(liar: tuple[LyingDrafter, str]) -> None:
    servicer, address = liar
    prompts = rename_prompts(NUM_PROMPTS, seed=5)
    requests = [GenerationRequest(prompt=p, max_new_tokens=MAX_NEW_TOKENS) for p in prompts]
    async with running_stack(gateway={"drafters": [address]}) as stack:
        expected = await oracle(stack, prompts)
        servicer.outputs = dict(zip(map(tuple, prompts), expected, strict=True))
        num_draft_tokens = 0
        # On a busy machine, all hints of a round may come too late.
        for _ in range(MAX_ROUNDS):
            generations = await stack.generate_all(requests, streams=NUM_PROMPTS)
            assert [g.token_ids for g in generations] == expected
            num_draft_tokens += sum(g.usage.num_draft_tokens for g in generations)
            if (
                num_draft_tokens
                and stack.hints(HintOutcome.STALE)
                and all(servicer.num_lies.values())
            ):
                break
        assert num_draft_tokens > 0
        assert stack.hints(HintOutcome.STALE) > 0
        assert all(servicer.num_lies.values()), servicer.num_lies
        await stack.check_idle()


async def test_a_flood_of_random_hints_changes_no_output() -> None:
    """Another session sends hints for its own, other sessions' and unknown sequences."""
    choice = random.Random(11)
    [prompt] = rename_prompts(1, seed=6)
    async with running_stack() as stack:
        [expected] = await oracle(stack, [prompt])
        async with grpc.aio.insecure_channel(stack.verifier.server.address) as channel:
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Session()
            hello = verifier_pb2.Hello(protocol_version=1, gateway_id="flooder")
            opening = verifier_pb2.Open(
                sequence_id="mine", token_ids=prompt, max_new_tokens=MAX_NEW_TOKENS
            )
            commands = [
                verifier_pb2.Command(hello=hello),
                verifier_pb2.Command(open=opening),
            ]
            await call.write(verifier_pb2.SessionRequest(commands=commands))
            output: list[int] = []
            while True:
                response = await call.read()
                assert isinstance(response, verifier_pb2.SessionResponse)
                for event in response.events:
                    assert not event.HasField("rejected")
                    output += event.decided.token_ids
                    if event.decided.finish_reason:
                        assert tuple(output) == expected
                        call.cancel()
                        await stack.check_idle()
                        return
                hints = [
                    verifier_pb2.Draft(
                        sequence_id=choice.choice(("mine", "unknown", "")),
                        base_length=choice.choice((0, len(prompt) + len(output), 2**32 - 1)),
                        token_ids=[choice.randrange(2**32) for _ in range(choice.randrange(64))],
                    )
                    for _ in range(20)
                ]
                commands = [verifier_pb2.Command(draft=hint) for hint in hints]
                await call.write(verifier_pb2.SessionRequest(commands=commands))
