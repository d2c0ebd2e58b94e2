"""Several ranks against one: the same tokens, one replica's life, and one replica's death."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1 import sampling_pb2, verifier_pb2_grpc
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.parallel_verifier import PATIENCE_S, Rank, start_ranks
from tests.verifier.running_verifier import ClientSession, StartVerifier

FLAGS = [
    "--model", str(MODEL_FOLDER), "--listen", "127.0.0.1:0", "--metrics-listen", "",
    "--device", "cpu", "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "256",
    "--max-num-batched-tokens", "64",
]  # fmt: skip

# "<|code|>def total(xs): ... <|rename|>xs<|to|>values<|out|>" in the bundled tokenizer.
PROMPT = [
    1, 319, 270, 329, 288, 12, 92, 87, 305, 275, 301, 281, 438, 275, 365, 783, 314, 783, 87, 30,
    267, 301, 984, 783, 275, 336, 301, 203, 2, 92, 87, 3, 1981, 4,
]  # fmt: skip
# The second one is longer than a step; both decode beside each other.
PROMPTS = {"a": PROMPT, "b": PROMPT * 7}
NUM_NEW_TOKENS = 24
GREEDY = sampling_pb2.SamplingParams(logprobs=2)
SEEDED = sampling_pb2.SamplingParams(logprobs=2, temperature=1.0, seed=7)


@asynccontextmanager
async def client(address: str) -> AsyncIterator["verifier_pb2_grpc.VerifierServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


async def generate(
    session: ClientSession,
    sampling: sampling_pb2.SamplingParams,
    drafts: dict[str, list[int]] | None = None,
) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their logprobs for all PROMPTS at once.

    Args:
        session: a greeted one.
        drafts: what to draft from, a part of it wrong; None drafts nothing.
    """
    names = {name: f"{name} {len(session.events)}" for name in PROMPTS}
    always = pb.DRAFT_WAIT_NEVER if drafts is None else pb.DRAFT_WAIT_ALWAYS
    await session.open(
        *(
            pb.Open(
                sequence_id=names[name],
                token_ids=prompt,
                max_new_tokens=NUM_NEW_TOKENS,
                ignore_eos=True,
                sampling=sampling,
                draft_wait=always,
            )
            for name, prompt in PROMPTS.items()
        )
    )
    drafted_lengths = dict.fromkeys(PROMPTS, 0)
    while not all(
        any(d.finish_reason for d in session.decided(sequence_id)) for sequence_id in names.values()
    ):
        await session.read()
        assert not session.rejected()
        for name, sequence_id in names.items():
            length = len(session.output(sequence_id))
            if drafts is None or length in (drafted_lengths[name], NUM_NEW_TOKENS):
                continue
            drafted_lengths[name] = length
            draft = drafts[name][length : length + 1 + length % 7]
            if length % 3 == 0:
                draft[-1:] = [5]
            await session.draft(sequence_id, len(PROMPTS[name]) + length, draft)
    return {
        name: [
            (logprob.token_id, logprob.logprob)
            for decided in session.decided(sequence_id)
            for logprob in decided.logprobs
        ]
        for name, sequence_id in names.items()
    }


def tokens(output: dict[str, list[tuple[int, float]]]) -> dict[str, list[int]]:
    return {name: [token_id for token_id, _ in pairs] for name, pairs in output.items()}


async def assert_drafts_change_nothing(session: ClientSession) -> dict[str, list[int]]:
    """Neither tokens nor any bit of their logprobs. Returns the greedy tokens."""
    for sampling in (SEEDED, GREEDY):
        plain = await generate(session, sampling)
        before = len(session.events)
        drafted = await generate(session, sampling, tokens(plain))
        assert drafted == plain
        decided = [e.decided for e in session.events[before:] if e.HasField("decided")]
        num_accepted = sum(d.num_accepted_tokens for d in decided)
        assert 0 < num_accepted < sum(d.num_draft_tokens for d in decided)
    return tokens(plain)


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest())).status


@pytest.fixture
def two_ranks() -> Iterator[list[Rank]]:
    with start_ranks(2, *FLAGS, "--tensor-parallel-size", "2") as ranks:
        yield ranks


async def test_two_ranks_are_one_replica_until_sigterm(
    two_ranks: list[Rank], start_verifier: StartVerifier
) -> None:
    address = await asyncio.to_thread(two_ranks[0].address)
    alone = await start_verifier()
    alone_session = await alone.greeted_session()
    expected = tokens(await generate(alone_session, GREEDY))
    async with client(address) as stub:
        session = ClientSession(stub.Session())
        welcome = await session.hello()
        assert await assert_drafts_change_nothing(session) == expected

        alone_welcome = alone_session.events[0].welcome
        assert welcome.model_digest == alone_welcome.model_digest
        assert welcome.numerics_digest != alone_welcome.numerics_digest

        # One more, which rank 0 lets finish.
        await session.open(
            pb.Open(
                sequence_id="last",
                token_ids=PROMPT,
                max_new_tokens=NUM_NEW_TOKENS,
                ignore_eos=True,
                draft_wait=pb.DRAFT_WAIT_ALWAYS,
            )
        )
        await session.wait_decided("last")
        for rank in reversed(two_ranks):  # as torchrun does
            rank.send_signal(signal.SIGTERM)
        await session.send(pb.Command(update=pb.Update(sequence_id="last", drafting=False)))
        assert await session.wait_finished("last") == expected["a"]
        assert await session.read_to_end() == grpc.StatusCode.OK
    for rank in two_ranks:
        assert await asyncio.to_thread(rank.wait) == 0
        assert "error" not in await asyncio.to_thread(rank.log)


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_killed_rank_takes_the_replica_down(two_ranks: list[Rank], lost: int) -> None:
    address = await asyncio.to_thread(two_ranks[0].address)
    async with client(address) as stub:
        session = ClientSession(stub.Session())
        await session.hello()
        await session.open(
            pb.Open(
                sequence_id="a",
                token_ids=PROMPT,
                ignore_eos=True,
                max_new_tokens=1500,
                draft_wait=pb.DRAFT_WAIT_NEVER,
            )
        )
        await session.wait_decided("a", 3)
        two_ranks[lost].send_signal(signal.SIGKILL)
        assert await session.read_to_end() == grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(two_ranks[1 - lost].wait, 10) == 1
    assert f"rank {lost} is gone" in await asyncio.to_thread(two_ranks[1 - lost].log)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health_of(address)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
