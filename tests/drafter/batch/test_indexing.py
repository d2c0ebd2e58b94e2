"""The background indexer: which texts are left to it, and in which order it indexes them."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

import drafter.batch.indexer
from drafter.batch.answer import index_texts
from drafter.batch.indexer import Indexer
from drafter.batch.time_slices import TimeSlices
from drafter.budgets import (
    COOL_DOWN_S,
    NGRAMS_PER_LONG_STEP,
    NGRAMS_PER_STEP,
)
from drafter.ngram.index import BUDGET_SPENT
from drafter.ngram.text import HASH_BASE
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import INDEXED, replay
from tests.drafter.local_drafter import LocalDrafter
from tests.drafter.running_drafter import FakeClock, StartDrafter, exchange


async def test_text_without_a_draft_request_is_answered_at_once_and_indexed_in_the_background(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    rng = random.Random(1)
    text = [rng.randrange(2**32) for _ in range(30_000)]
    for delta in replay("a", text, params=INDEXED):
        [proposal] = await running.propose(delta)
        assert (proposal.status, proposal.base_length) == (
            pb.STATUS_OK,
            delta.base_length + len(delta.token_ids),
        )
    assert running.drafter.servicer.engine.indexer.task is not None
    await running.indexed()
    assert not running.drafter.servicer.engine.indexer.has_work
    history = running.histories["a"]
    assert history.num_unindexed <= 5
    running.drafter.store.check_integrity()


async def test_a_text_with_many_unindexed_tokens_gets_no_draft_until_it_is_indexed(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    monkeypatch.setattr(Indexer, "_work", lambda indexer: asyncio.sleep(3600))
    rng = random.Random(2)
    text = [rng.randrange(2**32) for _ in range(24_000)]
    text += text[23_900:23_910]
    stream = running.open_stream()
    for delta in replay("a", text, params=INDEXED):
        await running.propose(delta)
    other = pb.SequenceDelta(sequence_id="b", token_ids=[1, 2, 9, 1, 2], max_draft_tokens=3)
    ask_now = pb.SequenceDelta(sequence_id="a", base_length=len(text), max_draft_tokens=20)
    both = pb.ProposeRequest(sequences=[ask_now, other])
    for response in (await running.stub.Propose(both), await exchange(stream, both)):
        unindexed, other_proposal = response.proposals
        assert (unindexed.status, unindexed.base_length) == (pb.STATUS_INDEXING, len(text))
        assert list(other_proposal.token_ids) == [9, 1, 2]
    monkeypatch.undo()
    indexer = running.drafter.servicer.engine.indexer
    await indexer.close()
    indexer._is_closed = False
    indexer.add([])
    await running.indexed()
    for response in (await running.stub.Propose(both), await exchange(stream, both)):
        assert list(response.proposals[0].token_ids) == text[23_910:23_930]


async def test_a_text_that_the_growth_of_another_evicts_keeps_no_other_from_being_indexed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = LocalDrafter()
    store = local.drafter.store
    names = ("grows", "evicted", "other")
    token_ids = random.Random(3).sample(range(2**32), 200)

    async def append(base: int, stop: int, *names: str) -> None:
        deltas = [
            pb.SequenceDelta(
                sequence_id=id_,
                base_length=base,
                token_ids=token_ids[base:stop],
                params=None if base else INDEXED,
            )
            for id_ in names
        ]
        await local.exchange(pb.ProposeRequest(sequences=deltas))

    await append(0, 4, *names)
    await append(4, 199, *names)
    # The indexer has not run yet. From now on "evicted" is the oldest, and there is no room.
    await append(199, 200, "grows", "other")
    monkeypatch.setattr(store._stored, "_max_bytes", store.history_bytes)
    # However slow the machine, all are to grow in one step.
    monkeypatch.setattr(drafter.batch.indexer, "GROWTH_S", 60.0)
    await local.settle()
    assert not local.engine.indexer.has_work
    assert {n: h.num_unindexed for n, h in local.histories.items()} == {"grows": 0, "other": 0}
    store.check_integrity()


async def test_drain_stops_the_indexer(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    servicer = running.drafter.servicer
    # It would never end.
    monkeypatch.setattr(Indexer, "_index", lambda *arguments: None)
    for delta in replay("a", list(range(20_000)), params=INDEXED):
        await running.propose(delta)
    indexer = servicer.engine.indexer
    assert indexer.task is not None
    assert indexer.has_work
    await asyncio.wait_for(servicer.drain(), 20)
    assert indexer.task.done()


async def test_long_text_is_indexed_however_many_short_tails_live_batches_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = LocalDrafter()
    await local.exchange(
        pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(sequence_id="short", token_ids=range(100), params=INDEXED),
                pb.SequenceDelta(sequence_id="long", token_ids=range(8000), params=INDEXED),
            ]
        )
    )
    short, long = (local.histories[id_] for id_ in ("short", "long"))
    index = index_texts

    def never_finish_short(headers: Any, base: Any, budget: int, statuses: Any) -> None:
        """As if new text came faster than it is indexed."""
        index(headers, base, budget, statuses)
        statuses[headers == short.address] = BUDGET_SPENT

    monkeypatch.setattr(drafter.batch.indexer, "index_texts", never_finish_short)
    async with asyncio.timeout(20):
        while long.num_unindexed > 5:
            local.engine.slices.live()
            await asyncio.sleep(0)
    assert local.engine.indexer.has_work
    await local.engine.indexer.close()


async def test_a_live_batch_waits_for_no_second_step_of_a_long_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither when the indexer is done waiting, nor while there are short tails."""
    local, clock = LocalDrafter(), FakeClock()
    slices = local.engine.indexer._slices = TimeSlices(clock=clock)
    slices.live()
    num_steps = 0

    def count(headers: Any, base: Any, budget: int, statuses: Any) -> None:
        nonlocal num_steps
        num_steps += budget == NGRAMS_PER_LONG_STEP
        index_texts(headers, base, budget, statuses)

    monkeypatch.setattr(drafter.batch.indexer, "index_texts", count)
    is_cooling = asyncio.Event()
    cool_down = slices.cool_down

    async def record_and_cool_down() -> None:
        is_cooling.set()
        await cool_down()

    monkeypatch.setattr(slices, "cool_down", record_and_cool_down)
    for part in replay("long", range(30_000), params=INDEXED):
        await local.exchange(pb.ProposeRequest(sequences=[part]))
    for step in range(1, 4):
        for _ in range(3):
            is_cooling.clear()
            await asyncio.wait_for(is_cooling.wait(), 10)
        assert num_steps == step
        clock.now_s += COOL_DOWN_S
    await local.engine.indexer.close()


async def test_a_step_of_the_indexer_enters_no_more_ngrams_than_it_may() -> None:
    local = LocalDrafter()
    await local.engine.indexer.close()
    # A text that repeats: n-grams of every size are entered, and no table grows.
    for part in replay("a", list(range(64)) * 200, params=INDEXED):
        await local.exchange(pb.ProposeRequest(sequences=[part]))
    history = local.histories["a"]
    headers = np.array([history.address], dtype=np.int64)
    statuses = np.empty(1, dtype=np.int64)
    index_texts(headers, HASH_BASE, NGRAMS_PER_STEP, statuses)
    assert statuses[0] == BUDGET_SPENT
    assert 0 < history.length - history.num_unindexed <= NGRAMS_PER_STEP
