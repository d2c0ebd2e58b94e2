"""Sessions with real drafters: exactness, moves, addresses, states, and what pools keep."""

import asyncio
from pathlib import Path

import grpc
import pytest
import trustme

from servicekit.config import ChannelOptions
from servicekit.errors import code_number
from tandem.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.v1 import verifier_pb2 as pb
from tests.scripted_dns import ScriptedDns
from tests.verifier.drafters.conftest import StartDrafter
from tests.verifier.drafters.drafted_sessions import (
    drafts_of,
    make_open,
    num_faults,
    output_of,
    statuses,
    wait_status,
)
from tests.verifier.opens import PROMPT
from tests.verifier.running_verifier import PATIENCE_S, ClientSession, StartVerifier

INVALID = code_number(grpc.StatusCode.INVALID_ARGUMENT)
UP, IDLE = pb.DrafterStatus.STATE_UP, pb.DrafterStatus.STATE_IDLE


async def propose(address: str, *deltas: drafter_pb2.SequenceDelta) -> list[drafter_pb2.Proposal]:
    """Asks a drafter by the unary call, as no verifier does."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        response = await stub.Propose(drafter_pb2.ProposeRequest(batch_id=1, sequences=deltas))
        return list(response.proposals)


async def num_sequences(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return (await stub.GetDrafterLoad(drafter_pb2.GetDrafterLoadRequest())).num_sequences


async def pooled(address: str, pool_id: str, pattern: list[int], count: int = 60) -> list[int]:
    """What a pool holds after a pattern that a sequence of its own begins with; [] if nothing.

    A text reaches the index a moment after its release, so the caller waits for what it expects.
    """
    [proposal] = await propose(
        address,
        drafter_pb2.SequenceDelta(
            sequence_id=f"reader of {pool_id}",
            token_ids=pattern,
            max_draft_tokens=count,
            params=drafter_pb2.NgramParams(min_ngram=2, max_ngram=5, pool_id=pool_id),
        ),
    )
    return list(proposal.token_ids) if proposal.source == drafter_pb2.SOURCE_POOL else []


async def until_pooled(address: str, pool_id: str, pattern: list[int], expected: list[int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await pooled(address, pool_id, pattern) != expected:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


async def until_released(address: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await num_sequences(address):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "evil.example:50051",
        "nonsense",
        "unix:/tmp/x",
        "x#.localhost:1",
        ":",
        "a:b:c",
    ],
)
async def test_an_address_that_is_not_admitted_is_refused_by_name(
    start_verifier: StartVerifier, start_drafter: StartDrafter, address: str
) -> None:
    admitted = await start_drafter()
    running = await start_verifier(drafters=[admitted, "localhost:2"])
    session = await running.greeted_session()
    await session.open(make_open("a", address))
    rejected = await session.wait_rejected()
    assert (rejected.sequence_id, rejected.code, rejected.field) == (
        "a",
        INVALID,
        "drafter_address",
    )
    assert repr(address) in rejected.message
    await session.open(make_open("b", admitted, max_new_tokens=400))
    update = pb.Update(sequence_id="b", drafter_address=address)
    await session.send(pb.Command(update=update))
    rejected = await session.wait_rejected(2)
    assert (rejected.sequence_id, rejected.code) == ("", INVALID)
    assert rejected.field == "update.drafter_address"
    assert await session.wait_finished("b"), "it goes on"
    assert {each.address for each in running.engine._drafters.in_use} == {admitted}


async def test_a_drafter_drafts_once_a_name_leads_to_it_and_has_the_names_certificate(
    start_verifier: StartVerifier, start_drafter: StartDrafter, tmp_path: Path
) -> None:
    """A gateway may have seen a new address of the name before the verifier has."""
    authority, host = trustme.CA(), "drafter.example"
    issued = authority.issue_cert(host)
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "drafter.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pem = tmp_path / "drafter.pem"
    address = await start_drafter(tls_cert=pem, tls_key=pem)
    dns = ScriptedDns(**{host: ["127.0.0.2"]})
    running = await start_verifier(
        drafters=[f"{host}:{address.rpartition(':')[2]}"],
        peers=ChannelOptions(peer_tls_ca=tmp_path / "ca.pem", resolve_interval_s=0.05),
        resolve=dns,
        draft_deadline_s=5.0,
    )
    resolving = asyncio.ensure_future(running.verifier.resolve_drafters())
    try:
        session = await running.greeted_session()
        expected = await output_of(session, make_open("a", address))
        await wait_status(session, address, pb.DrafterStatus.STATE_DOWN)
        assert drafts_of(session, "a") == (0, 0)
        dns.answers[host] = ["127.0.0.1", "127.0.0.2"]
        await wait_status(session, address, UP)
        opened = make_open("b", address, draft_wait=pb.DRAFT_WAIT_ALWAYS)
        assert await output_of(session, opened) == expected
        assert drafts_of(session, "b")[1] > 0
        assert num_faults(running) == 0
    finally:
        resolving.cancel()


async def test_sessions_are_told_of_drafters_after_their_welcome(
    start_verifier: StartVerifier, start_drafter: StartDrafter
) -> None:
    address = await start_drafter()
    running = await start_verifier(drafters=[address], drafter_idle_timeout_s=0.5)
    first = await running.greeted_session()
    assert statuses(first) == []
    await first.open(make_open("a", address, max_new_tokens=400))
    await wait_status(first, address, UP)
    second = await running.greeted_session()
    await wait_status(second, address, UP)
    assert second.events[0].HasField("welcome")
    await first.wait_finished("a")
    for session in (first, second):
        await wait_status(session, address, IDLE)
    third = await running.greeted_session()
    await output_of(third, make_open("b", address, draft_wait=pb.DRAFT_WAIT_ALWAYS))
    assert drafts_of(third, "b")[1] > 0, "connected again"
    assert statuses(third)[0] == (address, UP)


class TestPools:
    """The prompt's last two tokens lead to the output, in a pool that holds prompt and output; the
    output's first two lead to its rest.
    """

    async def run(
        self, session: ClientSession, name: str, address: str, **fields: object
    ) -> list[int]:
        ngram = drafter_pb2.NgramParams(min_ngram=2, max_ngram=5, pool_id=f"pool of {name}")
        return await output_of(session, make_open(name, address, ngram=ngram, **fields))

    @pytest.mark.parametrize("keep_length", [0, len(PROMPT) + 20])
    async def test_else_a_close_after_the_last_event_says_it(
        self, start_verifier: StartVerifier, start_drafter: StartDrafter, keep_length: int
    ) -> None:
        address = await start_drafter()
        running = await start_verifier(drafters=[address], draft_deadline_s=5.0)
        session = await running.greeted_session()
        output = await self.run(session, "a", address)
        close = pb.Close(sequence_id="a", keep=drafter_pb2.KEEP_OUTPUT, keep_length=keep_length)
        assert await pooled(address, "pool of a", output[:5]) == []
        await session.send(pb.Command(close=close))
        kept = output[: keep_length - len(PROMPT)] if keep_length else output
        await until_pooled(address, "pool of a", output[:5], kept[5:])

    @pytest.mark.parametrize("is_kept", [True, False])
    async def test_a_cancelled_sequence_keeps_what_its_close_says(
        self, start_verifier: StartVerifier, start_drafter: StartDrafter, is_kept: bool
    ) -> None:
        address = await start_drafter()
        running = await start_verifier(drafters=[address], draft_deadline_s=5.0)
        session = await running.greeted_session()
        ngram = drafter_pb2.NgramParams(min_ngram=2, max_ngram=5, pool_id="p")
        await session.open(
            make_open(
                "a", address, ngram=ngram, max_new_tokens=1500, keep=drafter_pb2.KEEP_ALL,
                draft_wait=pb.DRAFT_WAIT_ALWAYS,
            )
        )  # fmt: skip
        await session.wait_decided("a", 4)
        keep = drafter_pb2.KEEP_OUTPUT if is_kept else drafter_pb2.KEEP_UNSPECIFIED
        close = pb.Close(sequence_id="a", keep=keep, keep_length=len(PROMPT) + 12)
        await session.send(pb.Command(close=close))
        output = (await session.wait_finished("a"))[:12]
        if is_kept:
            await until_pooled(address, "p", output[:5], output[5:])
        else:
            await until_released(address)
            assert await pooled(address, "p", output[:5]) == []
