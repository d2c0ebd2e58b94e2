"""How one client's trouble stays its own: replays, clients that do not read, wrong deltas."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from drafter.batch.budgets import COOL_DOWN_S, SLICE_S
from drafter.batch.time_slices import TimeSlice, TimeSlices
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import FakeClock, ProposeCall, RunningDrafter, StartDrafter, ask

REPLAYED_TOKENS = 131_072
DELTA_TOKENS = 8_192


def live_batch(step: int) -> pb.ProposeRequest:
    """A verifier's step: eight sequences, a few new tokens each, drafts wanted."""
    return pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=f"live{i}",
                base_length=3 * step,
                token_ids=[1, 2, 3],
                max_draft_tokens=8,
            )
            for i in range(8)
        ]
    )


async def replay(stream: ProposeCall, sequence_id: str, num_tokens: int = REPLAYED_TOKENS) -> None:
    """A whole history in the longest deltas, written as fast as the stream takes them."""

    async def write() -> None:
        for base in range(0, num_tokens, DELTA_TOKENS):
            delta = pb.SequenceDelta(
                sequence_id=sequence_id,
                base_length=base,
                token_ids=range(base, base + DELTA_TOKENS),
            )
            await stream.write(pb.ProposeRequest(sequences=[delta]))

    writing = asyncio.create_task(write())
    for base in range(0, num_tokens, DELTA_TOKENS):
        response = await stream.read()
        assert isinstance(response, pb.ProposeResponse)
        assert response.proposals[0].base_length == base + DELTA_TOKENS
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


async def test_replays_of_many_gateways_let_live_batches_pass(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    slices = running.drafter.servicer.engine.slices = CountingSlices()
    live = running.open_stream()
    await ask(live, live_batch(0))

    replays = [asyncio.create_task(replay(running.open_stream(), f"long{i}")) for i in range(4)]
    num_bulk_passed = []
    step = 0
    while not all(task.done() for task in replays):
        step += 1
        before = slices.num_bulk
        response = await ask(live, live_batch(step))
        num_bulk_passed.append(slices.num_bulk - before)
        assert [p.status for p in response.proposals] == [pb.STATUS_OK] * 8
    await asyncio.gather(*replays)

    assert slices.num_bulk == 4 * REPLAYED_TOKENS // DELTA_TOKENS
    assert slices.max_bulk_at_once == 1
    # Without slices it is 6 and more at the median.
    assert sorted(num_bulk_passed)[len(num_bulk_passed) // 2] <= 2
    for i in range(4):
        delta = pb.SequenceDelta(sequence_id=f"long{i}", base_length=REPLAYED_TOKENS)
        [proposal] = await running.propose(delta)
        assert proposal.base_length == REPLAYED_TOKENS, "the replay arrived whole"


async def test_replays_are_not_held_back_when_nothing_is_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays_s = []
    sleep = asyncio.sleep

    async def sleep_noted(delay_s: float) -> None:
        delays_s.append(delay_s)
        await sleep(delay_s)

    monkeypatch.setattr("drafter.batch.time_slices.asyncio.sleep", sleep_noted)
    slices = TimeSlices()
    for _ in range(20):
        async with slices.bulk() as time_slice:
            await time_slice.pause()
    assert set(delays_s) <= {0}


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


async def test_a_slice_of_bulk_leaves_the_loop_alone_for_a_while_after_a_live_batch() -> None:
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


async def test_a_slice_knows_how_long_it_was_held_back() -> None:
    """What a batch takes is measured without that."""
    clock = FakeClock()
    slices = TimeSlices(clock=clock)
    async with contextlib.AsyncExitStack() as first:
        await first.enter_async_context(slices.bulk())
        waiting = asyncio.create_task(first_slice(slices))
        await asyncio.sleep(0)
        clock.now_s += 3.0
        await first.aclose()
        time_slice = await waiting
    assert time_slice.held_back_s == 3.0
    clock.now_s += 5.0
    assert time_slice.held_back_s == 3.0, "its own work is not waiting"

    def pass_the_time() -> None:
        clock.now_s += 2.0

    async with slices.bulk() as bulk:
        asyncio.get_running_loop().call_soon(pass_the_time)
        await bulk.pause()
        assert bulk.held_back_s == 2.0
    live = slices.live()
    clock.now_s += 1.0
    await live.pause()
    assert live.held_back_s == 0.0


async def first_slice(slices: TimeSlices) -> TimeSlice:
    async with slices.bulk() as time_slice:
        return time_slice


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


async def test_who_gives_up_waiting_for_a_slice_holds_nobody_up() -> None:
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


NUM_UNREAD = 100


async def ask_without_reading(running: RunningDrafter, stream: ProposeCall) -> None:
    """Asks for 20 MB of answers in a few hundred bytes, so that nothing but reading holds it up."""
    first = 2**32 - 40_000
    token_ids = [*range(first, first + 40_000), *range(first, first + 5)]
    for base in range(0, len(token_ids), DELTA_TOKENS):
        piece = token_ids[base : base + DELTA_TOKENS]
        delta = pb.SequenceDelta(sequence_id="unread", base_length=base, token_ids=piece)
        await ask(stream, pb.ProposeRequest(sequences=[delta]))
    await running.indexed()
    again = pb.SequenceDelta(
        sequence_id="unread", base_length=len(token_ids), max_draft_tokens=40_000
    )
    for _ in range(NUM_UNREAD):
        await stream.write(pb.ProposeRequest(sequences=[again]))


async def test_a_client_that_stops_reading_is_disconnected(start_drafter: StartDrafter) -> None:
    running = await start_drafter(unread_timeout_s=0.3)
    stream = running.open_stream()
    await ask_without_reading(running, stream)
    await asyncio.wait_for(running.drafter.servicer.streams.all_closed.wait(), 30)
    # Nothing is read yet, and what was held for the stream goes as at any stream's end.
    assert running.drafter.store.num_sequences == 1
    running.clock.now_s += 31
    assert (await running.load()).num_sequences == 0

    num_read = 0
    error = None
    while error is None:
        try:
            response = await stream.read()
        except grpc.aio.AioRpcError as ended_with:
            error = ended_with
        else:
            assert isinstance(response, pb.ProposeResponse)
            assert len(response.proposals[0].token_ids) == 40_000
            num_read += 1
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "answers were left unread for 0.3 s"
    assert 0 < num_read < NUM_UNREAD, "only what fits the transport was ever answered"


async def test_bystanders_notice_nothing_of_a_client_that_does_not_read(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter(unread_timeout_s=0.3)
    bystander, silent = running.open_stream(), running.open_stream()
    await ask(bystander, live_batch(0))
    await ask_without_reading(running, silent)
    step = 0
    async with asyncio.timeout(30):
        while len(running.drafter.servicer.streams) == 2:
            step += 1
            response = await ask(bystander, live_batch(step))
            assert len(response.proposals) == 8
    assert step > 0


async def test_a_slow_reader_that_reads_is_not_disconnected(start_drafter: StartDrafter) -> None:
    running = await start_drafter(unread_timeout_s=0.5)
    stream = running.open_stream()
    for step in range(2):
        await stream.write(live_batch(step))
        # Longer than the limit, but the transport has taken the answer.
        await asyncio.sleep(0.7)
        assert isinstance(await stream.read(), pb.ProposeResponse)


async def test_what_is_wrong_with_some_sequences_costs_the_others_nothing(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter(max_sequence_bytes=4096)
    known = pb.SequenceDelta(sequence_id="known", token_ids=[1, 2, 3, 4])
    await running.propose(known)

    def good(sequence_id: str, params: pb.NgramParams | None = None) -> pb.SequenceDelta:
        return pb.SequenceDelta(
            sequence_id=sequence_id,
            token_ids=[5, 6, 7, 5, 6],
            max_draft_tokens=2,
            params=params,
        )

    cases: list[tuple[pb.SequenceDelta, int, str]] = [
        (good("a"), pb.STATUS_OK, ""),
        *[
            (good(f"bad{i}", params), pb.STATUS_INVALID, field)
            for i, (field, params) in enumerate(
                [
                    ("params.min_ngram", pb.NgramParams(min_ngram=0)),
                    ("params.max_ngram", pb.NgramParams(max_ngram=33)),
                    ("params.max_ngram", pb.NgramParams(min_ngram=4, max_ngram=3)),
                    ("params.overlap", pb.NgramParams(overlap=99)),  # type: ignore[arg-type]
                    ("params.tie", pb.NgramParams(tie=99)),  # type: ignore[arg-type]
                    ("params.algorithm", pb.NgramParams(algorithm=99)),  # type: ignore[arg-type]
                ]
            )
        ],
        (
            pb.SequenceDelta(sequence_id="long", token_ids=[1] * 1025),
            pb.STATUS_INVALID,
            "token_ids",
        ),
        (
            pb.SequenceDelta(sequence_id="prompt", token_ids=[1], prompt_length=1025),
            pb.STATUS_INVALID,
            "prompt_length",
        ),
        (pb.SequenceDelta(sequence_id="unknown", base_length=9), pb.STATUS_OUT_OF_SYNC, ""),
        (
            pb.SequenceDelta(sequence_id="known", base_length=3, token_ids=[9]),
            pb.STATUS_OUT_OF_SYNC,
            "",
        ),
        (good("z"), pb.STATUS_OK, ""),
    ]
    request = pb.ProposeRequest(sequences=[delta for delta, _, _ in cases])
    for response in (
        await running.stub.Propose(request),
        await ask(running.open_stream(), request),
    ):
        for (delta, status, field), proposal in zip(cases, response.proposals, strict=True):
            assert proposal.sequence_id == delta.sequence_id
            assert proposal.status == status, delta.sequence_id
            if field:
                assert proposal.message.startswith(f"{field}: "), proposal.message
            if status == pb.STATUS_OK:
                assert list(proposal.token_ids) == [7, 5]
    assert (await running.load()).num_sequences == 3
