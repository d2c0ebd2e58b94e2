"""Which sequences are forgotten when, over a real connection, and the metrics of that."""

import asyncio

import grpc
import pytest

import drafter.service
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, exchange


def create(sequence_id: str, num_tokens: int = 1) -> pb.SequenceDelta:
    return pb.SequenceDelta(
        sequence_id=sequence_id,
        token_ids=[1] * num_tokens,
        # Without an index, so that the test can work out its bytes.
        params=pb.NgramParams(algorithm=pb.ALGORITHM_KMP),
    )


async def known_length(running: RunningDrafter, sequence_id: str) -> int:
    [proposal] = await running.propose(
        pb.SequenceDelta(sequence_id=sequence_id, base_length=2**32 - 1, token_ids=[1])
    )
    assert proposal.status == pb.STATUS_OUT_OF_SYNC
    return proposal.known_length


def evictions(running: RunningDrafter, reason: str) -> float:
    return running.sample("tandem_drafter_evictions_total", reason=reason)


async def test_expired_sequences_are_forgotten_without_requests(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter.service, "SWEEP_INTERVAL_S", 0.001)
    running = await start_drafter(idle_ttl_s=5)
    await running.propose(*[create(f"{i}") for i in range(300)])
    store, is_empty = running.drafter.store, asyncio.Event()
    evict = store._stored._on_eviction

    def watch(reason: object) -> None:
        evict(reason)  # type: ignore[arg-type]
        if store.num_sequences == 0:
            is_empty.set()

    monkeypatch.setattr(store._stored, "_on_eviction", watch)
    sweep = asyncio.create_task(running.drafter.servicer.sweep_forever())
    running.clock.now_s += 5
    try:
        await asyncio.wait_for(is_empty.wait(), 10)
    finally:
        sweep.cancel()
    assert evictions(running, "idle") == 300


async def has_ended(running: RunningDrafter) -> None:
    """Returns when the server knows that all streams have ended."""
    await asyncio.wait_for(running.drafter.servicer.streams.all_closed.wait(), 10)


@pytest.mark.parametrize("how", ["half-close", "cancel", "connection lost"])
async def test_sequences_of_a_stream_are_freed_thirty_seconds_after_its_end(
    start_drafter: StartDrafter, how: str
) -> None:
    running = await start_drafter()
    leaving = grpc.aio.insecure_channel(running.drafter.server.address)
    stream = drafter_pb2_grpc.DrafterServiceStub(leaving).ProposeStream()
    await exchange(stream, pb.ProposeRequest(sequences=[create(s) for s in "abc"]))
    await running.propose(create("unary"))
    if how == "half-close":
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    elif how == "cancel":
        stream.cancel()
    await leaving.close()
    await has_ended(running)

    await running.propose(create("b"))  # created again elsewhere
    running.clock.now_s += 29
    assert (await running.load()).num_sequences == 4
    running.clock.now_s += 1
    assert (await running.load()).num_sequences == 2
    assert [await known_length(running, s) for s in ("a", "b", "c", "unary")] == [0, 1, 0, 1]
    assert evictions(running, "stream_ended") == 2
