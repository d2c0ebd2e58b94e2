"""Several ranks against one: the same tokens; start, drain and failure of a replica."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1 import sampling_pb2, verifier_pb2_grpc
from tandem.v1 import verifier_pb2 as pb
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.opens import NUM_NEW_TOKENS, PROMPT, make_open
from tests.verifier.running_verifier import ClientSession, StartVerifier
from tests.verifier.tensor_parallel.parallel_verifier import PATIENCE_S, Rank, start_ranks

FLAGS = [
    "--model", str(MODEL_FOLDER), "--listen", "127.0.0.1:0", "--metrics-listen", "",
    "--device", "cpu", "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "256",
    "--max-num-batched-tokens", "64",
]  # fmt: skip

# The second one is longer than a step; both decode beside each other.
PROMPTS = {"a": PROMPT, "b": PROMPT * 7}
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
        session: after its Hello.
        drafts: texts to draft from, partly wrong; None: no drafts.
    """
    names = {name: f"{name} {len(session.events)}" for name in PROMPTS}
    draft_wait = pb.DRAFT_WAIT_NEVER if drafts is None else pb.DRAFT_WAIT_ALWAYS
    await session.open(
        *(
            make_open(names[name], token_ids=prompt, sampling=sampling, draft_wait=draft_wait)
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


async def assert_drafts_change_nothing(
    session: ClientSession, sampling: sampling_pb2.SamplingParams
) -> dict[str, list[int]]:
    """Asserts that tokens stay the same, and their logprobs up to rounding: the text has no
    near-ties. Returns the tokens.
    """
    plain = await generate(session, sampling)
    before = len(session.events)
    drafted = await generate(session, sampling, tokens(plain))
    assert tokens(drafted) == tokens(plain)
    for name, pairs in plain.items():
        expected = [logprob for _, logprob in pairs]
        assert [logprob for _, logprob in drafted[name]] == pytest.approx(expected, abs=1e-4)
    decided = [e.decided for e in session.events[before:] if e.HasField("decided")]
    num_accepted = sum(d.num_accepted_tokens for d in decided)
    assert 0 < num_accepted < sum(d.num_draft_tokens for d in decided)
    return tokens(plain)


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
        await assert_drafts_change_nothing(session, SEEDED)
        assert await assert_drafts_change_nothing(session, GREEDY) == expected

        alone_welcome = alone_session.events[0].welcome
        assert welcome.model_digest == alone_welcome.model_digest
        assert not welcome.numerics_digest
        assert alone_welcome.numerics_digest

        # One more, which rank 0 lets finish. Its prompt's first steps have no logits.
        await session.open(
            make_open(
                "last",
                token_ids=PROMPTS["b"],
                cache_salt="its own",
                draft_wait=pb.DRAFT_WAIT_ALWAYS,
            )
        )
        await session.wait_decided("last")
        for rank in reversed(two_ranks):  # as torchrun does
            rank.send_signal(signal.SIGTERM)
        await session.send(pb.Command(update=pb.Update(sequence_id="last", drafting=False)))
        assert await session.wait_finished("last") == expected["b"]
        assert await session.read_to_end() == grpc.StatusCode.OK
    for rank in two_ranks:
        assert await asyncio.to_thread(rank.wait) == 0
        assert "error" not in await asyncio.to_thread(rank.log)


@pytest.mark.parametrize(("lost", "is_idle"), [(0, False), (1, False), (1, True)])
async def test_a_killed_rank_ends_the_replica(
    two_ranks: list[Rank], lost: int, is_idle: bool
) -> None:
    address = await asyncio.to_thread(two_ranks[0].address)
    async with grpc.aio.insecure_channel(address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        session = ClientSession(verifier_pb2_grpc.VerifierServiceStub(channel).Session())
        await session.hello()
        draft_wait = pb.DRAFT_WAIT_ALWAYS if is_idle else pb.DRAFT_WAIT_NEVER
        await session.open(make_open("a", max_new_tokens=1500, draft_wait=draft_wait))
        await session.wait_decided("a")
        two_ranks[lost].send_signal(signal.SIGKILL)
        assert await session.read_to_end() == grpc.StatusCode.UNAVAILABLE
        # What is written last may be lost with the connection.
        said = set()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (response := await watched.read()) is not grpc.aio.EOF:
                    said.add(response.status)
            assert await watched.code() == grpc.StatusCode.UNAVAILABLE
        assert said <= {health_pb2.HealthCheckResponse.NOT_SERVING}
    survivor = two_ranks[1 - lost]
    assert await asyncio.to_thread(survivor.wait) == 1
    log = await asyncio.to_thread(survivor.log)
    assert '"event": "rank_lost"' in log
    assert f"rank {lost} is gone" in log
    assert "engine_stalled" not in log, "it has not stalled for 30 s"


def wait_all(ranks: list[Rank]) -> tuple[list[int], list[str]]:
    """The exit codes, and the last lines of the logs."""
    return [rank.wait() for rank in ranks], [rank.log().splitlines()[-1] for rank in ranks]


async def test_a_rank_with_other_files_is_refused(tmp_path: Path) -> None:
    # Of equal contents: rank 0 alone reads them all.
    copy = shutil.copytree(MODEL_FOLDER, tmp_path / "copy")
    other = {1: ["--model", str(copy)]}
    with start_ranks(2, *FLAGS, "--tensor-parallel-size", "2", flags_by_rank=other) as ranks:
        codes, lines = await asyncio.to_thread(wait_all, ranks)
    assert codes[0] == 2
    assert lines[0].startswith("error: --model: rank 1 has ")
