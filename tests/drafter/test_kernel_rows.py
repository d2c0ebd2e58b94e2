"""Batches whose rows kernels append, against the same batches with every row parsed by protobuf.

Two drafters get the same messages: their answers and their state must be the same.
"""

import asyncio
import random
from collections import Counter

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.pool_index.link import pool_block_of
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.drafter_pair import Client, DrafterPair, LocalDrafter
from tests.drafter.running_drafter import StartDrafter


async def send_to_two(rng: random.Random, bounds: dict[str, int], seen: Counter[str]) -> None:
    pair = DrafterPair(seen, **bounds)
    client = Client(rng)
    if rng.randrange(3) > 0:
        await pair.feed_pool(client.words(2000))
    for _ in range(rng.randrange(1, 40)):
        payload = client.request().SerializeToString()
        if rng.randrange(40) == 1:
            damaged = bytearray(payload)
            at = rng.randrange(len(damaged) + 1)
            damaged[at : at + 1] = [rng.randrange(256)]
            await pair.exchange(bytes(damaged))
            break  # the client does not know how the message was read
        await pair.exchange(payload)
        pair.work_on_pools(rng.randrange(8))
        pair.pass_time(rng.choice([0.25, 0.0, 2.0]))
        if rng.randrange(3) > 0:
            await pair.settle()
    await pair.check_same_state()


def test_kernel_rows_get_the_same_answers_as_rows_parsed_by_protobuf() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        rng=st.randoms(use_true_random=False),
        bounds=st.sampled_from(
            [
                {},
                {"max_sequences": 5, "max_sequence_bytes": 60_000},
                {"idle_ttl_s": 3},
            ]
        ),
    )
    def send(rng: random.Random, bounds: dict[str, int]) -> None:
        asyncio.run(send_to_two(rng, bounds, seen))

    send()
    assert seen["kernel rows"] > 200
    assert seen["parsed rows"] > 200
    assert min(seen[f"STATUS_{name}"] for name in ("OK", "NO_MATCH", "OUT_OF_SYNC", "INVALID")) > 20
    # In batches of kernel rows alone:
    assert seen["SOURCE_SEQUENCE"] > 100
    assert seen["SOURCE_POOL"] > 20
    assert seen["refused"] > 2


async def test_a_growing_text_may_evict_a_sequence_of_its_own_batch() -> None:
    """The evicted sequence may be of the same batch, and already appended to."""
    local = LocalDrafter()
    texts = {"first": 250, "grows": 256}
    for sequence_id, count in texts.items():
        created = pb.SequenceDelta(sequence_id=sequence_id, token_ids=range(count))
        await local.drafter.servicer.Propose(pb.ProposeRequest(sequences=[created]), None)  # type: ignore[arg-type]
    await local.settle()
    store = local.drafter.store
    # The known sequences fill all the bytes.
    store._stored._max_bytes = store.history_bytes
    request = pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=sequence_id, base_length=count, token_ids=[1, 2], max_draft_tokens=3
            )
            for sequence_id, count in texts.items()
        ]
    )
    proposals = (await local.exchange(request)).proposals
    assert [(p.status, p.base_length, list(p.token_ids)) for p in proposals] == [
        (pb.STATUS_OK, 252, [3, 4, 5]),
        (pb.STATUS_OK, 258, [3, 4, 5]),
    ]
    assert store.num_sequences == 1, "the first was evicted for the second"
    store.check_integrity()


async def test_kernel_rows_see_their_pool_appear_expire_and_appear_again() -> None:
    local = LocalDrafter(pool_ttl_s=5)
    known = [100, 101, 102]

    async def append_as_kernel_row() -> tuple[list[int], int]:
        """Two more tokens of a sequence; returns its draft and the source of that."""
        delta = pb.SequenceDelta(
            sequence_id="asks", base_length=len(known), token_ids=[7, 8], max_draft_tokens=2
        )
        [proposal] = (await local.exchange(pb.ProposeRequest(sequences=[delta]))).proposals
        assert not local.batch._odd
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
    assert await append_as_kernel_row() == ([], pb.SOURCE_UNSPECIFIED)
    await feed("mine", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await append_as_kernel_row()
    assert (found, source) == ([9, 9], pb.SOURCE_POOL)
    history = local.histories["asks"]
    assert pool_block_of(history.address) != 0

    local.clock.now_s += 6
    await local.settle()
    assert local.drafter.pools.num_pools == 0
    found, source = await append_as_kernel_row()
    assert source != pb.SOURCE_POOL, "expired texts are not drafted from"
    assert pool_block_of(history.address) == 0
    # Another pool is now where this one was in memory.
    await feed("theirs", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await append_as_kernel_row()
    assert source != pb.SOURCE_POOL, "texts of other pools are not drafted from"
    await feed("mine", [300, *known[-3:], 7, 8, 9, 5])
    assert await append_as_kernel_row() == ([9, 5], pb.SOURCE_POOL)


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


async def test_kernels_append_the_deltas_of_a_usual_step(start_drafter: StartDrafter) -> None:
    """Otherwise the pair would compare protobuf with itself."""
    running = await start_drafter()
    stream = running.open_bytes_stream()
    names = [f"{i:032x}" for i in range(40)]

    async def append_to_all(base: int) -> pb.ProposeResponse:
        request = pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(
                    sequence_id=name, base_length=base, token_ids=[1, 2], max_draft_tokens=4
                )
                for name in names
            ]
        )
        await stream.write(request.SerializeToString())
        answer = await stream.read()
        assert isinstance(answer, bytes)
        return pb.ProposeResponse.FromString(answer)

    await append_to_all(0)
    num_objects = 0
    append = running.drafter.store.append

    def count(*arguments: object) -> object:
        nonlocal num_objects
        num_objects += 1
        return append(*arguments)  # type: ignore[arg-type]

    running.drafter.store.append = count  # type: ignore[method-assign,assignment]
    for step in range(1, 10):
        response = await append_to_all(2 * step)
        assert [p.base_length for p in response.proposals] == [2 * step + 2] * 40
    assert num_objects == 0
