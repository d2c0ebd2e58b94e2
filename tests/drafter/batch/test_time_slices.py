"""Time slices of live and of bulk batches: replays do not hold up live batches."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from drafter.batch.time_slices import TimeSlice, TimeSlices
from drafter.batch.wire import MAX_TOKENS_PER_DELTA
from drafter.budgets import COOL_DOWN_S, SLICE_S
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import live_batch, replay
from tests.drafter.running_drafter import FakeClock, ProposeCall, StartDrafter, exchange

REPLAYED_TOKENS = 131_072


async def replay_on(stream: ProposeCall, sequence_id: str) -> None:
    """A whole history in the longest deltas, written as fast as the stream takes them."""
    deltas = replay(sequence_id, range(REPLAYED_TOKENS))

    async def write() -> None:
        for delta in deltas:
            await stream.write(pb.ProposeRequest(sequences=[delta]))

    writing = asyncio.create_task(write())
    for delta in deltas:
        response = await stream.read()
        assert isinstance(response, pb.ProposeResponse)
        assert response.proposals[0].base_length == delta.base_length + len(delta.token_ids)
    await writing


class CountingSlices(TimeSlices):
    """Counts bulk batches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bulk = 0
        self.max_bulk_at_once = 0
        self._at_once = 0

    @contextlib.asynccontextmanager
    async def bulk(self) -> AsyncIterator[TimeSlice]:
        async with super().bulk() as time_slice:
            self.num_bulk += 1
            self._at_once += 1
            self.max_bulk_at_once = max(self.max_bulk_at_once, self._at_once)
            try:
                yield time_slice
            finally:
                self._at_once -= 1


async def test_live_batches_are_answered_between_the_slices_of_replays(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    slices = running.drafter.servicer.engine.slices = CountingSlices()
    live = running.open_stream()
    await exchange(live, live_batch(0))

    replays = [asyncio.create_task(replay_on(running.open_stream(), f"long{i}")) for i in range(4)]
    num_bulk_passed = []
    step = 0
    while not all(task.done() for task in replays):
        step += 1
        before = slices.num_bulk
        response = await exchange(live, live_batch(step))
        num_bulk_passed.append(slices.num_bulk - before)
        assert [p.status for p in response.proposals] == [pb.STATUS_OK] * 8
    await asyncio.gather(*replays)

    assert slices.num_bulk == 4 * REPLAYED_TOKENS // MAX_TOKENS_PER_DELTA
    assert slices.max_bulk_at_once == 1
    # Without slices the median is 6 and more.
    assert sorted(num_bulk_passed)[len(num_bulk_passed) // 2] <= 2
    for i in range(4):
        delta = pb.SequenceDelta(sequence_id=f"long{i}", base_length=REPLAYED_TOKENS)
        [proposal] = await running.propose(delta)
        assert proposal.base_length == REPLAYED_TOKENS, "the replay arrived whole"


async def test_replays_go_on_under_endless_live_traffic() -> None:
    slices = TimeSlices()
    is_over = asyncio.Event()

    async def stay_live() -> None:
        while not is_over.is_set():
            slices.live()
            await asyncio.sleep(0)

    live = asyncio.create_task(stay_live())
    for _ in range(20):
        async with slices.bulk() as time_slice:
            await time_slice.pause()
    is_over.set()
    await live


async def test_slices_of_bulk_batches_keep_a_distance_while_traffic_is_live() -> None:
    slices = TimeSlices()
    slices.live()
    starts_s = []
    for _ in range(5):
        async with slices.bulk() as time_slice:
            starts_s.append(time.perf_counter())
            await time_slice.pause()
            starts_s.append(time.perf_counter())
    gaps_s = [after - before for before, after in itertools.pairwise(starts_s)]
    assert min(gaps_s) >= COOL_DOWN_S * 0.99


async def test_a_slice_is_over_after_its_time_and_begins_anew_after_a_pause() -> None:
    clock = FakeClock()
    slices = TimeSlices(clock=clock)
    async with slices.bulk() as bulk:
        for time_slice in (slices.live(), bulk):
            await time_slice.pause()
            over = [time_slice.is_over]
            clock.now_s += SLICE_S * 1.01
            over.append(time_slice.is_over)
            await time_slice.pause()
            over.append(time_slice.is_over)
            assert over == [False, True, False]


async def test_a_cancelled_wait_for_a_slice_frees_the_queue() -> None:
    slices = TimeSlices()
    async with slices.bulk():
        entered = contextlib.AsyncExitStack()
        waiting = asyncio.create_task(entered.enter_async_context(slices.bulk()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(60), slices.bulk():
        pass
