"""Batches step by step: what one step may do, what waits in the background, what threads share."""

import asyncio
import random

import numpy as np
import pytest

from drafter.batch.answerer import BUDGET, PARALLEL_TEXTS, Answerer, Answers
from drafter.batch.batch_rows import BatchRows
from drafter.batch.drafting import MOST_AWAITED_NGRAMS
from drafter.batch.time_slices import Turn
from drafter.history.history import History
from drafter.ngram.params import NgramParams, Tie
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
    assert running.drafter.servicer.batches.indexing is not None
    await running.indexed()
    assert not running.drafter.servicer._drafting.is_behind
    history = running.drafter.store._kept.by_id["a"]
    assert history.num_unindexed <= 5
    running.drafter.store.check_integrity()


async def test_a_text_that_is_far_behind_gets_no_draft_until_it_is_indexed(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    monkeypatch.setattr(running.drafter.servicer.batches, "_index_in_background", lambda: None)
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
    await running.propose(other)
    await running.indexed()
    for response in (await running.stub.Propose(both), await ask_on(stream, both)):
        assert list(response.proposals[0].token_ids) == text[23_910:23_930]


async def test_a_text_that_lacks_less_is_waited_for(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    text = list(range(4_000))
    text += text[100:110]
    delta = pb.SequenceDelta(sequence_id="a", token_ids=text, max_draft_tokens=20)
    assert len(text) * 4 <= MOST_AWAITED_NGRAMS
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
    assert store._kept.by_id["good"].num_unindexed <= 5
    [entry] = running.log
    assert (entry["event"], entry["sequence_id"]) == ("sequence_failed", "bad")
    store.check_integrity()


async def test_drain_ends_what_goes_on_in_the_background(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    servicer = running.drafter.servicer
    # It would go on for ever.
    monkeypatch.setattr(servicer._drafting, "index_step", lambda: None)
    for delta in parts("a", list(range(20_000))):
        await running.propose(delta)
    assert servicer.batches.indexing is not None
    assert servicer._drafting.is_behind
    await asyncio.wait_for(servicer.drain(), 20)
    assert servicer.batches.indexing.done()


async def test_a_released_text_is_not_indexed_any_more(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    for delta in parts("a", list(range(60_000))):
        await running.propose(delta)
    await running.stub.Release(pb.ReleaseRequest(releases=[pb.Release(sequence_id="a")]))
    await running.indexed()
    assert running.drafter.store.history_bytes == 0


def test_rows_follow_their_histories_when_others_make_these_grow() -> None:
    """Kernels read at these addresses: an old one may be anything's by now."""
    rows = BatchRows(2)
    history = History(params=NgramParams(), prompt_length=0, max_tokens=1 << 20)
    history.append(np.arange(60_000, dtype=np.uint32))
    rows.ask(1, history, 8, is_wanted=True)
    old = history.address
    ask([history], [0])
    assert history.address != old, "its directory has grown"
    rows.refresh()
    assert rows.headers.tolist() == [0, history.address]


async def test_a_batch_that_pauses_follows_its_histories(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    num_refreshed = num_pauses = 0
    refresh, pause = BatchRows.refresh, Turn.pause

    def count_refresh(rows: BatchRows, *of: np.ndarray) -> None:
        nonlocal num_refreshed
        num_refreshed += not of
        refresh(rows, *of)

    async def count_pause(turn: Turn) -> None:
        nonlocal num_pauses
        assert num_pauses == num_refreshed, "not since the last pause"
        num_pauses += 1
        await pause(turn)

    monkeypatch.setattr(BatchRows, "refresh", count_refresh)
    monkeypatch.setattr(Turn, "pause", count_pause)
    monkeypatch.setattr(Turn, "is_over", True)
    deltas = [pb.SequenceDelta(sequence_id=f"{i}", token_ids=range(3000)) for i in range(20)]
    await running.propose(*deltas)
    await ask_on(running.open_stream(), pb.ProposeRequest(sequences=deltas))
    assert num_pauses == num_refreshed > 20


class CountingAnswerer(Answerer):
    """Counts the calls."""

    num_calls = 0

    def answer(self, *arguments: object, **options: object) -> Answers:
        self.num_calls += 1
        return super().answer(*arguments, **options)  # type: ignore[arg-type]


def test_no_call_enters_more_than_its_budget() -> None:
    answerer = CountingAnswerer()
    # Of a text that repeats, n-grams of every size are looked at; and no table has to grow.
    text = text_of(list(range(64)) * 2048, NgramParams())
    assert ask([text], [8], answerer) == [(list(range(8)), 64)]
    assert answerer.num_calls >= 0.9 * 4 * 131_072 / BUDGET


def test_texts_that_lack_nothing_do_not_wait_for_long_ones_in_the_same_call() -> None:
    answerer = Answerer()
    long = [text_of(list(range(40_000)), NgramParams()) for _ in range(3)]
    short = text_of([1, 2, 9, 1, 2], NgramParams())
    ask([short], [0])
    answers = answerer.answer([*long, short], [8] * 4)
    assert answers.statuses[:3].all(), "these need many calls"
    assert answers.statuses[3] == 0
    assert answers.draft_lengths[3] == 3


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_that_share_a_batch_give_the_same_answers(num_threads: int) -> None:
    rng = np.random.default_rng(3)
    num_texts = PARALLEL_TEXTS + 123
    contexts = [rng.integers(0, 6, rng.integers(0, 200)).tolist() for _ in range(num_texts)]
    params = NgramParams(min_ngram=1, tie=Tie.LONGEST, chained=True)
    wanted = [i % 40 for i in range(num_texts)]
    alone = ask([text_of(c, params) for c in contexts], wanted)
    shared = ask([text_of(c, params) for c in contexts], wanted, Answerer(num_threads=num_threads))
    assert shared == alone
    assert sum(draft is not None for draft in alone) > 300
