"""Batches in slices: what one call may do, and what waits in the background."""

import asyncio
import gc
import random
from typing import Any

import pytest

from benchmarks.drafter_texts import Call
from drafter.batch.batch import Batch
from drafter.batch.budgets import MAX_AWAITED_NGRAMS, NGRAMS_PER_ANSWER
from drafter.batch.indexer import Indexer
from drafter.batch.time_slices import TimeSlice
from drafter.history.history import History
from drafter.ngram.index import DONE
from drafter.ngram.params import NgramParams
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.asked_text import ask, text_of
from tests.drafter.running_drafter import StartDrafter
from tests.drafter.running_drafter import ask as ask_on


def parts(sequence_id: str, text: list[int], most_tokens: int = 0) -> list[pb.SequenceDelta]:
    return [
        pb.SequenceDelta(
            sequence_id=sequence_id,
            base_length=start,
            token_ids=text[start : start + 8192],
            max_draft_tokens=most_tokens,
        )
        for start in range(0, len(text), 8192)
    ]


async def test_text_that_nobody_waits_for_is_answered_at_once_and_indexed_in_the_background(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    rng = random.Random(1)
    text = [rng.randrange(2**32) for _ in range(30_000)]
    for delta in parts("a", text):
        [proposal] = await running.propose(delta)
        assert (proposal.status, proposal.base_length) == (
            pb.STATUS_OK,
            delta.base_length + len(delta.token_ids),
        )
    assert running.drafter.servicer.engine.indexer.task is not None
    await running.indexed()
    assert not running.drafter.servicer.engine.indexer.has_work
    history = running.drafter.store._stored.by_id["a"]
    assert history.num_unindexed <= 5
    running.drafter.store.check_integrity()


async def test_a_text_that_is_far_behind_gets_no_draft_until_it_is_indexed(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    monkeypatch.setattr(Indexer, "_work", lambda indexer: asyncio.sleep(3600))
    rng = random.Random(2)
    text = [rng.randrange(2**32) for _ in range(24_000)]
    text += text[23_900:23_910]
    stream = running.open_stream()
    for delta in parts("a", text):
        await running.propose(delta)
    other = pb.SequenceDelta(sequence_id="b", token_ids=[1, 2, 9, 1, 2], max_draft_tokens=3)
    ask_now = pb.SequenceDelta(sequence_id="a", base_length=len(text), max_draft_tokens=20)
    both = pb.ProposeRequest(sequences=[ask_now, other])
    for response in (await running.stub.Propose(both), await ask_on(stream, both)):
        behind, bystander = response.proposals
        assert (behind.status, behind.base_length) == (pb.STATUS_INDEXING, len(text))
        assert list(bystander.token_ids) == [9, 1, 2]
    monkeypatch.undo()
    indexer = running.drafter.servicer.engine.indexer
    await indexer.close()
    indexer._is_closed = False
    indexer.add(short_tails=[], long_tails=[], feeding=[])
    await running.indexed()
    for response in (await running.stub.Propose(both), await ask_on(stream, both)):
        assert list(response.proposals[0].token_ids) == text[23_910:23_930]


async def test_a_text_that_lacks_less_is_waited_for(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    text = list(range(4_000))
    text += text[100:110]
    delta = pb.SequenceDelta(sequence_id="a", token_ids=text, max_draft_tokens=20)
    assert len(text) * 4 <= MAX_AWAITED_NGRAMS
    [proposal] = await running.propose(delta)
    assert list(proposal.token_ids) == text[110:130]


async def test_a_text_that_cannot_be_indexed_in_the_background_stops_no_other(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    store = running.drafter.store
    grow_table = store.grow_table

    def fail_for_one(history: History, index: int) -> None:
        if history.sequence_id == "bad":
            raise MemoryError
        grow_table(history, index)

    monkeypatch.setattr(store, "grow_table", fail_for_one)
    for sequence_id in ("bad", "good"):
        await running.propose(*parts(sequence_id, list(range(8_000))))
    await running.indexed()
    assert store.num_sequences == 1
    assert store._stored.by_id["good"].num_unindexed <= 5
    [entry] = running.log
    assert (entry["event"], entry["sequence_id"]) == ("sequence_failed", "bad")
    store.check_integrity()


async def test_drain_ends_what_goes_on_in_the_background(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    servicer = running.drafter.servicer
    # It would go on for ever.
    monkeypatch.setattr(Indexer, "_index", lambda *arguments: None)
    for delta in parts("a", list(range(20_000))):
        await running.propose(delta)
    indexer = servicer.engine.indexer
    assert indexer.task is not None
    assert indexer.has_work
    await asyncio.wait_for(servicer.drain(), 20)
    assert indexer.task.done()


async def test_a_released_text_is_not_indexed_any_more(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    for delta in parts("a", list(range(60_000))):
        await running.propose(delta)
    await running.stub.Release(pb.ReleaseRequest(releases=[pb.Release(sequence_id="a")]))
    await running.indexed()
    assert running.drafter.store.history_bytes == 0


async def test_rows_follow_their_texts_when_others_make_these_grow_or_go(
    start_drafter: StartDrafter,
) -> None:
    """Kernels read at these addresses: an old one may be anything's by now."""
    running = await start_drafter()
    engine, store = running.drafter.servicer.engine, running.drafter.store
    for delta in parts("grows", list(range(60_000))):
        await running.propose(delta)
    await running.propose(pb.SequenceDelta(sequence_id="goes", token_ids=[1, 2, 9, 1]))
    await running.indexed()
    batch = Batch(store, lease=None)
    asked = [("grows", 60_000, [5, 6]), ("goes", 4, [2])]
    request = pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=sequence_id, base_length=base, token_ids=tokens, max_draft_tokens=2
            )
            for sequence_id, base, tokens in asked
        ]
    )
    batch.scan(request.SerializeToString())
    assert engine._append_run(batch, 0, 2) == 2

    batch.hold(2)  # as before every pause
    grows = store._stored.by_id["grows"]
    old = grows.address
    while grows.address == old:
        store.grow_table(grows, 0)
    assert store.release("goes") is not None
    gc.collect()
    batch.refresh()  # as after it

    await engine._answer_open(batch, engine.slices.live())
    answer = pb.ProposeResponse.FromString(batch.write(min_unindexed=32, max_short_tail=256))
    assert [list(p.token_ids) for p in answer.proposals] == [[7, 8], [9, 1]]


async def test_a_batch_that_pauses_holds_its_texts_and_follows_them(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    calls: list[str] = []

    def recorded(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def record(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(owner, name, record)

    recorded(Batch, "hold")
    recorded(Batch, "refresh")
    recorded(TimeSlice, "pause")
    monkeypatch.setattr(TimeSlice, "is_over", True)
    deltas = [pb.SequenceDelta(sequence_id=f"{i}", token_ids=range(3000)) for i in range(20)]
    await running.propose(*deltas)
    await ask_on(running.open_stream(), pb.ProposeRequest(sequences=deltas))
    pauses = [i for i, name in enumerate(calls) if name == "pause"]
    assert len(pauses) > 20
    for i in pauses:
        assert calls[i - 1 : i + 2] == ["hold", "pause", "refresh"]


def test_no_call_enters_more_than_its_budget() -> None:
    # Of a text that repeats, n-grams of every size are looked at; and no table has to grow.
    text = text_of(list(range(64)) * 2048, NgramParams())
    num_calls = 1
    while (call := Call([text], [8]).run()).statuses[0] != DONE:
        num_calls += 1
    assert call.draft(0) == (list(range(8)), 64)
    assert num_calls >= 0.9 * 4 * 131_072 / NGRAMS_PER_ANSWER


def test_texts_that_are_indexed_do_not_wait_for_long_ones_in_the_same_call() -> None:
    long = [text_of(list(range(40_000)), NgramParams()) for _ in range(3)]
    short = text_of([1, 2, 9, 1, 2], NgramParams())
    ask([short], [0])
    call = Call([*long, short], [8] * 4).run()
    assert call.statuses[:3].all(), "these need many calls"
    assert call.statuses[3] == DONE
    assert call.draft_lengths[3] == 3
