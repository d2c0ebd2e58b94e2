"""Several streams at once, pauses of a batch, readiness and drain."""

import asyncio
import gc
import random
import threading
import time
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import drafter.batch.engine
import drafter.server
from drafter.batch.answer import OPEN, OUTCOME, answer_rows
from drafter.batch.batch import Batch
from drafter.batch.time_slices import TimeSlice
from drafter.budgets import SLICE_S
from drafter.ngram.params import DEFAULT_PARAMS
from drafter.service import SERVICE_NAME
from tandem.v1 import drafter_pb2 as pb
from tests.drafter import brute_force
from tests.drafter.deltas import INDEXED, delta, replay
from tests.drafter.local_drafter import LocalDrafter
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, exchange


class SlowAnswers:
    """Kernel calls that answer one row each, and use up a time slice for it."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    def answer_rows(self, rows: npt.NDArray[np.int64], first: int, stop: int, *rest: Any) -> int:
        self.has_begun.set()
        end_s = time.perf_counter() + 1.2 * SLICE_S
        while time.perf_counter() < end_s:
            pass
        is_open = np.flatnonzero(rows[first:stop, OUTCOME] == OPEN)
        if len(is_open) == 0:
            return 0
        row = first + int(is_open[0])
        return answer_rows(rows, row, row + 1, *rest) + len(is_open) - 1


@pytest.fixture
async def slow_answers(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunningDrafter, SlowAnswers]:
    running, slow = await start_drafter(), SlowAnswers()
    monkeypatch.setattr(drafter.batch.engine, "answer_rows", slow.answer_rows)
    return running, slow


def batch(name: str, num_sequences: int, batch_id: int = 0) -> pb.ProposeRequest:
    return pb.ProposeRequest(
        batch_id=batch_id,
        sequences=[
            pb.SequenceDelta(sequence_id=f"{name}{i}", token_ids=[1, 2, 1, 2], max_draft_tokens=2)
            for i in range(num_sequences)
        ],
    )


async def health(running: RunningDrafter, service: str = SERVICE_NAME) -> int:
    stub = health_pb2_grpc.HealthStub(running.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def test_short_batches_are_answered_during_a_long_one(
    slow_answers: tuple[RunningDrafter, SlowAnswers],
) -> None:
    running, slow = slow_answers
    first, second = running.open_stream(), running.open_stream()
    finished: list[str] = []

    async def send(stream: grpc.aio.StreamStreamCall, name: str, num_sequences: int) -> None:
        response = await exchange(stream, batch(name, num_sequences))
        assert [list(p.token_ids) for p in response.proposals] == [[1, 2]] * num_sequences
        finished.append(name)

    long_batch = asyncio.create_task(send(first, "long", 300))
    await slow.has_begun.wait()
    await send(second, "short", 1)
    assert await health(running) is not None
    finished.append("health")
    await long_batch
    assert finished == ["short", "health", "long"]


async def test_streams_may_interleave_appends_to_the_same_sequences(
    slow_answers: tuple[RunningDrafter, SlowAnswers],
) -> None:
    running, _ = slow_answers
    texts = {f"s{i}": [random.Random(i).randrange(3) for _ in range(30)] for i in range(12)}

    async def feed(seed: int) -> None:
        """Sends pieces of the texts."""
        rng = random.Random(seed)
        stream = running.open_stream()
        known = dict.fromkeys(texts, 1)
        for _ in range(12):
            deltas = []
            for sequence_id in rng.sample(sorted(texts), rng.randint(1, 12)):
                start = rng.randint(1, known[sequence_id])
                end = min(start + rng.randint(0, 8), 30)
                deltas.append(
                    pb.SequenceDelta(
                        sequence_id=sequence_id,
                        base_length=start,
                        token_ids=texts[sequence_id][start:end],
                        max_draft_tokens=5,
                    )
                )
            response = await exchange(stream, pb.ProposeRequest(sequences=deltas))
            for sent, proposal in zip(deltas, response.proposals, strict=True):
                assert proposal.status in (pb.STATUS_OK, pb.STATUS_NO_MATCH)
                assert proposal.base_length >= sent.base_length + len(sent.token_ids)
                context = texts[proposal.sequence_id][: proposal.base_length]
                expected = brute_force.propose(context, DEFAULT_PARAMS, 5)
                assert list(proposal.token_ids) == (expected[0] if expected else [])
                known[proposal.sequence_id] = proposal.base_length

    await running.propose(
        *[pb.SequenceDelta(sequence_id=s, token_ids=text[:1]) for s, text in texts.items()]
    )
    await asyncio.gather(*[feed(seed) for seed in range(4)])
    running.drafter.store.check_integrity()


@pytest.mark.parametrize(("max_length", "expected"), [(46, [4, 5]), (44, []), (43, [])])
async def test_a_draft_stays_within_its_limit_when_another_stream_lengthens_the_sequence(
    monkeypatch: pytest.MonkeyPatch, max_length: int, expected: list[int]
) -> None:
    """The second stream appends while the first one's batch pauses after it appended."""
    local = LocalDrafter()
    await local.append("s", 0, [*range(20), *range(20)])
    monkeypatch.setattr(TimeSlice, "is_over", True)

    async def lengthen() -> None:
        request = pb.ProposeRequest(sequences=[delta("s", 42, [2, 3], 0)])
        await local.engine.answer(Batch(request, lease=None))

    limited = delta("s", 40, [0, 1], 10, max_length=max_length)
    # A batch pauses before a creation.
    created = [delta(f"{i}", 0, [1]) for i in range(2)]
    request = pb.ProposeRequest(sequences=[limited, *created])
    answer, _ = await asyncio.gather(local.exchange(request), lengthen())
    [proposal, *_] = answer.proposals
    assert (proposal.base_length, list(proposal.token_ids)) == (44, expected)
    assert proposal.status == (pb.STATUS_OK if expected else pb.STATUS_NO_MATCH)


async def test_a_cancelled_batch_keeps_the_store_consistent(
    slow_answers: tuple[RunningDrafter, SlowAnswers],
) -> None:
    running, slow = slow_answers
    stream = running.open_stream()
    await stream.write(batch("a", 400))
    await slow.has_begun.wait()
    stream.cancel()
    await asyncio.wait_for(running.drafter.servicer.streams.all_closed.wait(), 10)
    store = running.drafter.store
    store.check_integrity()
    assert 0 < store.num_sequences <= 400


async def test_nothing_is_served_before_the_kernels_are_warm(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_finish = threading.Event()

    def warm_up() -> None:
        assert may_finish.wait(10)

    running = await start_drafter(is_open=False)
    monkeypatch.setattr(drafter.server, "warm_up", warm_up)
    warming = asyncio.create_task(running.drafter.warm_up())
    assert await health(running) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.stub.Propose(batch("a", 1))
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as error:
        # Without writing: gRPC may call that INTERNAL where the stream is refused meanwhile.
        await running.open_stream().read()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    may_finish.set()
    await warming
    await exchange(running.open_stream(), batch("a", 1))


async def test_drain_answers_what_was_read_and_ends_the_streams(
    slow_answers: tuple[RunningDrafter, SlowAnswers],
) -> None:
    running, slow = slow_answers
    servicer = running.drafter.servicer
    idle, never_used, busy = (running.open_stream() for _ in range(3))
    await exchange(idle, batch("idle", 1))
    await never_used.wait_for_connection()
    slow.has_begun.clear()
    await busy.write(batch("busy", 100, batch_id=9))
    await slow.has_begun.wait()

    async def drain() -> int:
        await servicer.drain()
        return running.drafter.store.num_sequences

    draining = asyncio.create_task(drain())
    response = await busy.read()
    assert isinstance(response, pb.ProposeResponse)
    assert response.batch_id == 9
    assert len(response.proposals) == 100
    for stream in (idle, busy):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (error.value.details() or "")
    num_known = await asyncio.wait_for(draining, 10)
    assert num_known == 101, "drain waits for the answers to requests that were read"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.open_stream().read()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_rows_follow_texts_that_others_move_or_release(
    start_drafter: StartDrafter,
) -> None:
    """Kernels read at these addresses: the memory at an old one may be reused."""
    running = await start_drafter()
    engine, store = running.drafter.servicer.engine, running.drafter.store
    for piece in replay("grows", list(range(60_000)), params=INDEXED):
        await running.propose(piece)
    await running.propose(pb.SequenceDelta(sequence_id="goes", token_ids=[1, 2, 9, 1]))
    await running.indexed()
    asked = [("grows", 60_000, [5, 6]), ("goes", 4, [2])]
    request = pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=sequence_id, base_length=base, token_ids=tokens, max_draft_tokens=2
            )
            for sequence_id, base, tokens in asked
        ]
    )
    batch = Batch(request, lease=None)
    for sent in request.sequences:
        engine._append(batch, sent)
    batch.place_drafts()

    grows = running.histories["grows"]
    old = grows.address
    while grows.address == old:
        store.grow_table(grows, 0)
    assert store.release("goes") is not None
    gc.collect()
    batch.locate()  # as after every pause

    await engine._answer_open(batch, engine.slices.live())
    for i in range(batch.num_rows):
        batch.write(i)
    assert [list(p.token_ids) for p in batch.response.proposals] == [[7, 8], [9, 1]]


async def test_a_batch_may_pause_after_each_table_that_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table takes up to a tenth of a slice, and a batch may have thousands of texts."""
    local = LocalDrafter()
    await local.engine.indexer.close()  # all texts are indexed for their answers
    names = [f"{i}" for i in range(4)]
    for step, count in ((0, 40), (40, 240)):
        tokens = range(step, step + count)
        params = None if step else INDEXED
        deltas = [delta(name, step, tokens, 0, params=params) for name in names]
        await local.exchange(pb.ProposeRequest(sequences=deltas))
    calls: list[str] = []
    grow_table, pause = local.drafter.store.grow_table, TimeSlice.pause

    def record_growth(*arguments: Any) -> None:
        calls.append("grow")
        grow_table(*arguments)

    async def record_pause(time_slice: TimeSlice) -> None:
        calls.append("pause")
        await pause(time_slice)

    monkeypatch.setattr(local.drafter.store, "grow_table", record_growth)
    monkeypatch.setattr(TimeSlice, "pause", record_pause)
    monkeypatch.setattr(TimeSlice, "is_over", True)
    deltas = [delta(name, 280, [5, 6], 2) for name in names]
    response = await local.exchange(pb.ProposeRequest(sequences=deltas))
    assert [list(p.token_ids) for p in response.proposals] == [[7, 8]] * 4
    grown = [i for i, call in enumerate(calls) if call == "grow"]
    assert len(grown) >= len(names)
    assert all(calls[i + 1] == "pause" for i in grown)
