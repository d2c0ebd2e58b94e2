"""Batches while sequences are evicted, pools come and go, and messages do not parse."""

import grpc
import pytest

from drafter.pool_index.link import pool_block_of
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.local_drafter import LocalDrafter
from tests.drafter.running_drafter import StartDrafter


async def test_rows_see_their_pool_appear_expire_and_appear_again() -> None:
    local = LocalDrafter(pool_ttl_s=5)
    known = [100, 101, 102]

    async def append_and_ask() -> tuple[list[int], int]:
        """Two more tokens of a sequence; returns its draft and the source of that."""
        delta = pb.SequenceDelta(
            sequence_id="asks", base_length=len(known), token_ids=[7, 8], max_draft_tokens=2
        )
        [proposal] = (await local.exchange(pb.ProposeRequest(sequences=[delta]))).proposals
        known.extend([7, 8])
        # A new token, so that its own text never matches.
        known.append(200 + len(known))
        more = pb.SequenceDelta(
            sequence_id="asks", base_length=len(known) - 1, token_ids=known[-1:]
        )
        await local.drafter.servicer.Propose(pb.ProposeRequest(sequences=[more]), None)  # type: ignore[arg-type]
        return list(proposal.token_ids), proposal.source

    async def feed(pool_id: str, token_ids: list[int]) -> None:
        params = pb.NgramParams(min_ngram=2, pool_id=pool_id)
        fed = pb.SequenceDelta(sequence_id="fed", token_ids=token_ids, params=params)
        await local.drafter.servicer.Propose(pb.ProposeRequest(sequences=[fed]), None)  # type: ignore[arg-type]
        release = pb.Release(sequence_id="fed", keep=pb.KEEP_ALL)
        await local.drafter.servicer.Propose(pb.ProposeRequest(releases=[release]), None)  # type: ignore[arg-type]
        await local.settle()

    created = pb.SequenceDelta(
        sequence_id="asks",
        token_ids=known,
        params=pb.NgramParams(
            min_ngram=2, max_ngram=2, tie=pb.TIE_LONGEST, tokens_per_match=0, pool_id="mine"
        ),
    )
    await local.drafter.servicer.Propose(pb.ProposeRequest(sequences=[created]), None)  # type: ignore[arg-type]
    assert await append_and_ask() == ([], pb.SOURCE_UNSPECIFIED)
    await feed("mine", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await append_and_ask()
    assert (found, source) == ([9, 9], pb.SOURCE_POOL)
    history = local.histories["asks"]
    assert pool_block_of(history.address) != 0

    local.clock.now_s += 6
    await local.settle()
    assert local.drafter.pools.num_pools == 0
    found, source = await append_and_ask()
    assert source != pb.SOURCE_POOL, "expired texts are not drafted from"
    assert pool_block_of(history.address) == 0
    # Another pool is now where this one was in memory.
    await feed("theirs", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await append_and_ask()
    assert source != pb.SOURCE_POOL, "texts of other pools are not drafted from"
    await feed("mine", [300, *known[-3:], 7, 8, 9, 5])
    assert await append_and_ask() == ([9, 5], pb.SOURCE_POOL)


async def test_a_message_that_does_not_parse_ends_its_stream(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    good = pb.ProposeRequest(sequences=[pb.SequenceDelta(sequence_id="a", token_ids=[1])])
    for broken in (b"\xff", good.SerializeToString() + b"\x12\x7f", b"\x12\x03\x0a\x01\xff"):
        stream = running.open_bytes_stream()
        await stream.write(good.SerializeToString() + broken)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await running.load()).num_sequences == 0
