"""What a batch owes to those of other streams; and how a stream's waits end."""

import asyncio
from collections.abc import Iterable

import pytest

from drafter.batch.batch import Batch
from drafter.batch.budgets import MIN_UNINDEXED, NGRAMS_PER_STEP
from drafter.batch.time_slices import TimeSlices
from drafter.errors import NotServingError
from drafter.open_streams import OpenStreams
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.two_drafters import Side


async def append_two(side: Side, base: int) -> int:
    """Sends two tokens of a sequence; returns the proposal's status."""
    delta = pb.SequenceDelta(
        sequence_id="a", base_length=base, token_ids=[1, 2], max_draft_tokens=2
    )
    [proposal] = (await side.ask(pb.ProposeRequest(sequences=[delta]))).proposals
    return proposal.status


async def test_a_sequence_whose_stream_is_gone_is_unknown_to_a_pure_batch() -> None:
    side = Side()
    store = side.drafter.store
    other = Batch(store, store.start_stream())
    assert await append_two(side, 0) == pb.STATUS_NO_MATCH
    assert side.batch.lease is not None
    store.end_stream(side.batch.lease)
    side.clock.now_s += store.limits.stream_grace_s - 1
    side.batch = other
    assert await append_two(side, 2) == pb.STATUS_OK
    side.clock.now_s += 1
    assert await append_two(side, 4) == pb.STATUS_OUT_OF_SYNC


async def test_short_tails_are_left_until_they_are_worth_indexing() -> None:
    side = Side()
    await append_two(side, 0)
    await side.settle()
    history = side.drafter.store._stored.by_id["a"]
    for base in range(2, MIN_UNINDEXED - 2, 2):
        await append_two(side, base)
        await side.settle()
        assert history.num_unindexed == base + 2
    assert side.engine.indexer.task is None
    await append_two(side, history.length)
    await side.settle()
    assert history.num_unindexed == 0


async def test_batches_of_several_streams_are_all_counted_and_indexed() -> None:
    """The second may be answered before the first's answer is on its way."""
    side = Side()
    store = side.drafter.store
    batches = [Batch(store, store.start_stream()) for _ in range(2)]
    for sequence_id, batch in zip("ab", batches, strict=True):
        delta = pb.SequenceDelta(sequence_id=sequence_id, token_ids=range(100))
        batch.scan(pb.ProposeRequest(sequences=[delta]).SerializeToString())
        await side.engine.answer(batch)
    for batch in batches:
        side.engine.finish(batch)
    await side.settle()
    assert sum(number or 0 for number in side.num_proposals()) == 2
    assert [store._stored.by_id[id_].num_unindexed for id_ in "ab"] == [0, 0]


async def test_who_asks_while_texts_are_indexed_does_not_wait_until_all_are() -> None:
    side = Side()
    # Together they bring several times what one step enters.
    sequence_ids = [f"{i}" for i in range(4 * NGRAMS_PER_STEP // MIN_UNINDEXED)]

    async def append_to_all(base: int, token_ids: Iterable[int]) -> None:
        await side.ask(
            pb.ProposeRequest(
                sequences=[
                    pb.SequenceDelta(sequence_id=id_, base_length=base, token_ids=token_ids)
                    for id_ in sequence_ids
                ]
            )
        )

    def num_unindexed() -> list[int]:
        return [h.num_unindexed for h in side.drafter.store._stored.by_id.values()]

    await append_to_all(0, range(MIN_UNINDEXED - 1))
    assert side.engine.indexer.task is None, "so few are left"
    await append_to_all(MIN_UNINDEXED - 1, range(MIN_UNINDEXED, 2 * MIN_UNINDEXED))
    brought = sum(num_unindexed())
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(num_unindexed()) < brought
    assert max(num_unindexed()) >= MIN_UNINDEXED
    await append_to_all(2 * MIN_UNINDEXED - 1, [5])
    assert max(num_unindexed()) >= MIN_UNINDEXED
    await side.settle()
    assert max(num_unindexed()) <= 5


async def test_long_text_is_indexed_however_many_short_tails_live_batches_bring() -> None:
    side = Side()
    await side.ask(
        pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(sequence_id="short", token_ids=range(100)),
                pb.SequenceDelta(sequence_id="long", token_ids=range(8000)),
            ]
        )
    )
    short, long = (side.drafter.store._stored.by_id[id_] for id_ in ("short", "long"))
    async with asyncio.timeout(20):
        while long.num_unindexed > 5:
            # As though new text came faster than it is entered.
            side.engine.slices.live()
            side.engine.indexer.add(short_tails=[short.slot], long_tails=[], feeding=[])
            await asyncio.sleep(0)
    await side.engine.indexer.close()


async def test_a_batch_without_long_text_is_live_traffic() -> None:
    side = Side()
    await append_two(side, 0)
    now_s = 5.0
    slices = side.engine.slices = TimeSlices(clock=lambda: now_s)
    await append_two(side, 2)
    assert slices._last_live_s == now_s
    long = pb.SequenceDelta(sequence_id="a", base_length=4, token_ids=range(1000))
    now_s = 6.0
    await side.ask(pb.ProposeRequest(sequences=[long]))
    assert slices._last_live_s == 5.0


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
