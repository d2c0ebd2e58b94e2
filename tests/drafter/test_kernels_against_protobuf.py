"""Batches whose rows kernels append, against the same of which protobuf parses every row.

Two drafters get the same messages: whatever is sent, they must answer the same and know the same.
"""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter.ngram.text import MIN_CAPACITY_TOKENS
from drafter.pool_index.link import pool_block_of
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import StartDrafter
from tests.drafter.two_drafters import Client, Side, TwoDrafters

ROOT = Path(__file__).parents[2]
STREAM = "/tandem.v1.DrafterService/ProposeStream"
Stream = grpc.aio.StreamStreamCall[bytes, bytes]


async def send_to_two(rng: random.Random, bounds: dict[str, int], seen: Counter[str]) -> None:
    two = TwoDrafters(seen, **bounds)
    client = Client(rng)
    if rng.randrange(3) > 0:
        await two.feed_pool(client.words(2000))
    for _ in range(rng.randrange(1, 40)):
        payload = client.request().SerializeToString()
        if rng.randrange(40) == 1:
            damaged = bytearray(payload)
            at = rng.randrange(len(damaged) + 1)
            damaged[at : at + 1] = [rng.randrange(256)]
            await two.ask(bytes(damaged))
            break  # who knows what was understood
        await two.ask(payload)
        two.work_on_pools(rng.randrange(8))
        two.pass_time(rng.choice([0.25, 0.0, 2.0]))
        if rng.randrange(3) > 0:
            await two.settle()
    await two.know_the_same()


def test_rows_that_kernels_append_are_answered_as_those_that_protobuf_parses() -> None:
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
    assert seen["pure"] > 200
    assert seen["with odd rows"] > 200
    assert min(seen[f"STATUS_{name}"] for name in ("OK", "NO_MATCH", "OUT_OF_SYNC", "INVALID")) > 20
    # Of those that are pure:
    assert seen["SOURCE_SEQUENCE"] > 100
    assert seen["SOURCE_POOL"] > 20
    assert seen["refused"] > 2


async def test_tokens_that_do_not_fit_where_the_others_are_move_the_text() -> None:
    side = Side()
    known = 0
    for count, capacity, num_odd in (
        (MIN_CAPACITY_TOKENS - 9, MIN_CAPACITY_TOKENS, 1),
        (9, MIN_CAPACITY_TOKENS, 0),
        (1, 2 * MIN_CAPACITY_TOKENS, 1),
        (1, 2 * MIN_CAPACITY_TOKENS, 0),
    ):
        tokens = range(known, known + count)
        delta = pb.SequenceDelta(sequence_id="a", base_length=known, token_ids=tokens)
        [proposal] = (await side.ask(pb.ProposeRequest(sequences=[delta]))).proposals
        assert proposal.status == pb.STATUS_OK
        await side.settle()
        known += count
        history = side.drafter.store._stored.by_id["a"]
        assert len(history.buffer) == capacity
        assert history.token_ids.tolist() == list(range(known))
        assert len(side.batch._odd) == num_odd
        side.drafter.store.check_integrity()


async def test_a_text_that_grows_makes_room_like_any_other() -> None:
    """The one that goes may be of the same batch, and already taken."""
    side = Side()
    texts = {"first": 250, "grows": 256}
    for sequence_id, count in texts.items():
        created = pb.SequenceDelta(sequence_id=sequence_id, token_ids=range(count))
        await side.drafter.servicer.Propose(pb.ProposeRequest(sequences=[created]), None)  # type: ignore[arg-type]
    await side.settle()
    store = side.drafter.store
    # No room is left but for what is there.
    held = store.history_bytes
    store._stored._max_bytes = held
    request = pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=sequence_id, base_length=count, token_ids=[1, 2], max_draft_tokens=3
            )
            for sequence_id, count in texts.items()
        ]
    )
    proposals = (await side.ask(request)).proposals
    assert [(p.status, p.base_length, list(p.token_ids)) for p in proposals] == [
        (pb.STATUS_OK, 252, [3, 4, 5]),
        (pb.STATUS_OK, 258, [3, 4, 5]),
    ]
    assert store.num_sequences == 1, "the first had to go for the second"
    store.check_integrity()


async def test_a_pure_batch_follows_its_pool_as_that_comes_and_goes() -> None:
    side = Side(pool_ttl_s=5)
    known = [100, 101, 102]

    async def ask_live() -> tuple[list[int], int]:
        """Two more tokens of a sequence, whose row is not odd."""
        delta = pb.SequenceDelta(
            sequence_id="asks", base_length=len(known), token_ids=[7, 8], max_draft_tokens=2
        )
        [proposal] = (await side.ask(pb.ProposeRequest(sequences=[delta]))).proposals
        assert not side.batch._odd
        known.extend([7, 8])
        # So that its own text never matches.
        known.append(200 + len(known))
        more = pb.SequenceDelta(
            sequence_id="asks", base_length=len(known) - 1, token_ids=known[-1:]
        )
        await side.drafter.servicer.Propose(pb.ProposeRequest(sequences=[more]), None)  # type: ignore[arg-type]
        return list(proposal.token_ids), proposal.source

    async def feed(pool_id: str, token_ids: list[int]) -> None:
        params = pb.NgramParams(min_ngram=2, pool_id=pool_id)
        fed = pb.SequenceDelta(sequence_id="fed", token_ids=token_ids, params=params)
        await side.drafter.servicer.Propose(pb.ProposeRequest(sequences=[fed]), None)  # type: ignore[arg-type]
        release = pb.Release(sequence_id="fed", keep=pb.KEEP_ALL)
        await side.drafter.servicer.Propose(pb.ProposeRequest(releases=[release]), None)  # type: ignore[arg-type]
        await side.settle()

    created = pb.SequenceDelta(
        sequence_id="asks",
        token_ids=known,
        params=pb.NgramParams(
            min_ngram=2, max_ngram=2, tie=pb.TIE_LONGEST, tokens_per_match=0, pool_id="mine"
        ),
    )
    await side.drafter.servicer.Propose(pb.ProposeRequest(sequences=[created]), None)  # type: ignore[arg-type]
    assert await ask_live() == ([], pb.SOURCE_UNSPECIFIED)
    await feed("mine", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await ask_live()
    assert (found, source) == ([9, 9], pb.SOURCE_POOL)
    history = side.drafter.store._stored.by_id["asks"]
    assert pool_block_of(history.address) != 0

    side.clock.now_s += 6
    await side.settle()
    assert side.drafter.pools.num_pools == 0
    found, source = await ask_live()
    assert source != pb.SOURCE_POOL, "what is gone is never shown"
    assert pool_block_of(history.address) == 0
    # Another takes its place in memory.
    await feed("theirs", [300, *known[-3:], 7, 8, 9, 9])
    found, source = await ask_live()
    assert source != pb.SOURCE_POOL, "what is in another pool is never shown"
    await feed("mine", [300, *known[-3:], 7, 8, 9, 5])
    assert await ask_live() == ([9, 5], pb.SOURCE_POOL)


async def test_what_is_no_request_is_refused_whole(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    good = pb.ProposeRequest(sequences=[pb.SequenceDelta(sequence_id="a", token_ids=[1])])
    for broken in (b"\xff", good.SerializeToString() + b"\x12\x7f", b"\x12\x03\x0a\x01\xff"):
        stream: Stream = running.channel.stream_stream(STREAM)()
        running.streams.append(stream)
        await stream.write(good.SerializeToString() + broken)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await running.load()).num_sequences == 0


async def test_kernels_append_what_a_step_usually_brings(start_drafter: StartDrafter) -> None:
    """Otherwise the two drafters would work alike."""
    running = await start_drafter()
    stream: Stream = running.channel.stream_stream(STREAM)()
    running.streams.append(stream)
    names = [f"{i:032x}" for i in range(40)]

    async def ask(base: int) -> pb.ProposeResponse:
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

    await ask(0)
    num_objects = 0
    append = running.drafter.store.append

    def count(*arguments: object) -> object:
        nonlocal num_objects
        num_objects += 1
        return append(*arguments)  # type: ignore[arg-type]

    running.drafter.store.append = count  # type: ignore[method-assign,assignment]
    for step in range(1, 10):
        response = await ask(2 * step)
        assert [p.base_length for p in response.proposals] == [2 * step + 2] * 40
    assert num_objects == 0


def test_a_warm_drafter_has_nothing_left_to_compile() -> None:
    """It would stand still for seconds, with everybody waiting."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.drafter.warm_drafter"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
