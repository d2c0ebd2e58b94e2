"""What a batch that one call answers owes to others; and how a stream's waits end."""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest

from drafter.batch.live_answerer import INDEX_BUDGET
from drafter.batch.live_kernel import LEAST_INDEXED
from drafter.batch.time_slices import Turns
from drafter.errors import NotServingError
from drafter.history.store import StreamLease
from drafter.open_streams import OpenStreams
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.two_drafters import Side


async def tell(side: Side, lease: StreamLease, base: int) -> tuple[int, bool]:
    """Two tokens of a sequence; returns its status, and whether one call answered it."""
    delta = pb.SequenceDelta(
        sequence_id="a", base_length=base, token_ids=[1, 2], max_draft_tokens=2
    )
    payload = pb.ProposeRequest(sequences=[delta]).SerializeToString()
    response, work = await side.batches.answer_message(payload, lease, lambda releases: None)
    [proposal] = pb.ProposeResponse.FromString(response).proposals
    return proposal.status, work is None


async def test_a_sequence_whose_stream_is_gone_is_not_known_to_a_live_batch() -> None:
    side = Side()
    store = side.drafter.store
    first, second = store.start_stream(), store.start_stream()
    assert await tell(side, first, 0) == (pb.STATUS_NO_MATCH, False)
    store.end_stream(first)
    side.clock.now_s += store.limits.stream_grace_s - 1
    assert await tell(side, second, 2) == (pb.STATUS_OK, True)
    side.clock.now_s += 1
    assert await tell(side, second, 4) == (pb.STATUS_OUT_OF_SYNC, False)


async def test_live_batches_of_several_streams_are_all_noted_and_indexed() -> None:
    """The second may be answered before the first's answer is on its way."""
    side = Side()
    lease = side.drafter.store.start_stream()
    await tell(side, lease, 0)
    history = side.drafter.store._kept.by_id["a"]
    for num_batches, num_unindexed in ((4, 8), (LEAST_INDEXED // 2, 0)):
        for base in range(history.length, 2 * num_batches, 2):
            assert (await tell(side, lease, base))[1]
        side.batches.index(None)
        await side.settle()
        assert sum(number or 0 for number in side.num_proposals()) == num_batches
        assert history.num_unindexed == num_unindexed, "few are not worth it"


async def test_who_asks_while_texts_are_indexed_does_not_wait_until_all_are() -> None:
    side = Side()
    lease = side.drafter.store.start_stream()
    count = LEAST_INDEXED - 1
    # Together they bring several times what one step enters.
    sequence_ids = [f"{i}" for i in range(4 * INDEX_BUDGET // LEAST_INDEXED)]

    async def tell_all(base: int, token_ids: Iterable[int]) -> bool:
        """Returns whether one call answered it."""
        deltas = [
            pb.SequenceDelta(sequence_id=id_, base_length=base, token_ids=token_ids)
            for id_ in sequence_ids
        ]
        payload = pb.ProposeRequest(sequences=deltas).SerializeToString()
        _, work = await side.batches.answer_message(payload, lease, lambda releases: None)
        side.batches.index(work)
        return work is None

    def num_unindexed() -> list[int]:
        return [h.num_unindexed for h in side.drafter.store._kept.by_id.values()]

    await tell_all(0, [1])
    assert max(num_unindexed()) == 0
    assert await tell_all(1, range(2, count + 1))
    assert side.batches.indexing is None, "so few are left"
    assert await tell_all(count, range(count + 1, 2 * count))
    brought = sum(num_unindexed())
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(num_unindexed()) < brought
    assert max(num_unindexed()) >= LEAST_INDEXED
    assert await tell_all(2 * count - 1, [5])
    assert max(num_unindexed()) >= LEAST_INDEXED
    await side.settle()
    assert max(num_unindexed()) <= 1


async def test_long_text_is_indexed_however_much_live_batches_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side()
    lease = side.drafter.store.start_stream()
    delta = pb.SequenceDelta(sequence_id="long", token_ids=range(8000))
    payload = pb.ProposeRequest(sequences=[delta]).SerializeToString()
    _, work = await side.batches.answer_message(payload, lease, lambda releases: None)

    def is_behind() -> bool:
        return side.batches._drafting.is_behind

    assert is_behind()
    # As though new text came faster than it is entered.
    monkeypatch.setattr(side.batches._live, "index_step", lambda slots: slots)
    side.batches._unindexed.append(np.array([0]))
    side.batches.index(work)
    async with asyncio.timeout(20):
        while is_behind():
            side.batches.turns.note_live()
            await asyncio.sleep(0)
    await side.batches.close()


async def test_a_batch_that_one_call_answers_is_live_traffic() -> None:
    side = Side()
    lease = side.drafter.store.start_stream()
    await tell(side, lease, 0)
    now_s = 5.0
    turns = side.batches.turns = Turns(clock=lambda: now_s)
    assert (await tell(side, lease, 2))[1]
    assert turns._last_live_s == now_s


async def test_what_has_come_is_not_lost_to_the_end_of_its_wait() -> None:
    streams = OpenStreams(unread_timeout_s=1.0)
    async with streams.open() as stream:
        stream.begin_wait()
        streams.end_waits()
        stream.go_on()
        # Longer than any turn of the loop that the end of the wait was to come with.
        for _ in range(10):
            await asyncio.sleep(0)
    assert streams.all_closed.is_set()


async def wait_until_ended(streams: OpenStreams) -> None:
    async with streams.open() as stream:
        stream.begin_wait()
        streams.end_waits()
        streams.end_waits()
        await asyncio.Event().wait()


async def test_waits_for_clients_are_ended_and_nothing_else_is() -> None:
    streams = OpenStreams(unread_timeout_s=1.0)
    async with streams.open() as working:
        with pytest.raises(NotServingError):
            await wait_until_ended(streams)
        working.begin_write()
        for _ in range(10):
            await asyncio.sleep(0)
    assert streams.all_closed.is_set()
