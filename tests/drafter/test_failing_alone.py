"""What fails alone: logged once, counted, and everything else goes on."""

import asyncio
import itertools
import sys
import threading
from typing import Any

import numpy as np
import pytest

import drafter.batch.engine
import drafter.batch.indexer
import drafter.service
from drafter.batch.answer import answer_rows, index_texts
from drafter.batch.append import append_rows
from drafter.batch.scan import TEXT_LENGTH
from drafter.pool_index.records import PoolLimits
from drafter.pools.store import PoolStore
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, ask


def step(base_length: int, num_tokens: int, *names: str) -> pb.ProposeRequest:
    tokens = [i % 7 for i in range(base_length, base_length + num_tokens)]
    return pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=name, base_length=base_length, token_ids=tokens, max_draft_tokens=2
            )
            for name in names
        ]
    )


def assert_failed_once(running: RunningDrafter, event: str, reason: str) -> None:
    [entry] = [entry for entry in running.log if entry["log_level"] in ("error", "warning")]
    assert entry["event"] == event
    name = "tandem_drafter_internal_errors_total"
    assert running.sample(name, reason=reason) == 1


async def test_a_text_whose_index_fails_is_forgotten_and_the_others_are_indexed(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    store = running.drafter.store

    def fail_for_one(records: Any, slots: Any, *rest: Any) -> None:
        histories = [store.by_slot[slot] for slot in slots.tolist()]
        if any(history is not None and history.sequence_id == "bad" for history in histories):
            raise MemoryError
        index_texts(records, slots, *rest)

    monkeypatch.setattr(drafter.batch.indexer, "index_texts", fail_for_one)
    stream = running.open_stream()
    names = ("a", "bad", "b")
    for base_length in (0, 40, 80):
        await ask(stream, step(base_length, 40, *names))
        await running.indexed()
    [a, bad, b] = (await ask(stream, step(120, 40, *names))).proposals
    await running.indexed()
    assert a.token_ids == b.token_ids == [6, 0]
    assert bad.status == pb.STATUS_OUT_OF_SYNC
    assert store._stored.by_id["a"].num_unindexed == store._stored.by_id["b"].num_unindexed == 0
    assert_failed_once(running, "sequence_failed", "sequence")


async def test_rows_that_a_kernel_failed_to_append_are_appended_one_by_one(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    await ask(stream, step(0, 20, "a", "b"))

    def fail_after_appending(*arguments: Any) -> int:
        append_rows(*arguments)
        raise MemoryError

    monkeypatch.setattr(drafter.batch.engine, "append_rows", fail_after_appending)
    for base_length in (20, 25):
        response = await ask(stream, step(base_length, 5, "a", "b"))
        following = (base_length + 5) % 7
        assert [list(p.token_ids) for p in response.proposals] == [
            [following, (following + 1) % 7]
        ] * 2
    assert running.log == []


async def test_a_sequence_that_cannot_be_drafted_for_fails_alone(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_one(rows: Any, first: int, stop: int, *rest: Any) -> int:
        if (rows[first:stop, TEXT_LENGTH] == 13).any():
            raise MemoryError
        return answer_rows(rows, first, stop, *rest)

    running = await start_drafter()
    monkeypatch.setattr(drafter.batch.engine, "answer_rows", fail_for_one)
    request = pb.ProposeRequest(
        sequences=[
            *step(0, 20, "a").sequences,
            *step(0, 13, "bad").sequences,
            *step(0, 20, "b").sequences,
        ]
    )
    [a, bad, b] = (await ask(running.open_stream(), request)).proposals
    assert a.token_ids == b.token_ids == [6, 0]
    assert (bad.status, bad.message) == (pb.STATUS_INVALID, "internal error")
    assert_failed_once(running, "sequence_failed", "sequence")
    running.drafter.store.check_integrity()


async def test_what_expires_is_looked_for_again_after_a_failure(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter.service, "SWEEP_INTERVAL_S", 0.001)
    running = await start_drafter(idle_ttl_s=10.0)
    store = running.drafter.store
    await running.propose(*step(0, 5, "a").sequences)
    forget_expired, calls = store.forget_expired, itertools.count()
    has_forgotten = asyncio.Event()

    def fail_at_first(most: int) -> int:
        if next(calls) == 0:
            raise RuntimeError("at first")
        num_forgotten = forget_expired(most)
        if num_forgotten:
            has_forgotten.set()
        return num_forgotten

    monkeypatch.setattr(store, "forget_expired", fail_at_first)
    running.clock.now_s += 11
    upkeep = asyncio.create_task(running.drafter.run_forever())
    try:
        await asyncio.wait_for(has_forgotten.wait(), 20)
    finally:
        upkeep.cancel()
    assert store.num_sequences == 0
    assert_failed_once(running, "sweep_failed", "upkeep")


async def test_pools_whose_work_fails_are_emptied_and_taken_in_again(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    pools = running.drafter.pools
    texts = [np.arange(10, dtype=np.uint32)] * 2
    with monkeypatch.context() as failing:
        failing.setattr(pools, "work", lambda: 1 // 0)
        pools.feed("p", texts[0], feed_id="", ngram_mask=2)
        await running.drafter.pool_keeper.settle()
    assert pools.num_pools == pools.num_texts == 0
    assert_failed_once(running, "pools_failed", "pools")
    pools.feed("p", texts[1], feed_id="", ngram_mask=2)
    await running.drafter.pool_keeper.settle()
    assert pools.num_tokens == 10


def test_texts_may_be_counted_by_another_thread_while_pools_come_and_go() -> None:
    """As the metrics endpoint does."""
    limits = PoolLimits(max_pool_bytes=1 << 16, max_pools_bytes=1 << 20, pool_ttl_s=10)
    now_s = 0.0
    store = PoolStore(limits, clock=lambda: now_s, seed=1)
    is_over = threading.Event()
    errors: list[Exception] = []

    def count() -> None:
        while not is_over.is_set():
            try:
                assert store.num_texts >= 0
                assert store.num_pools >= 0
                assert store.occupied_bytes >= 0
            except Exception as error:
                errors.append(error)
                return

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counting = threading.Thread(target=count)
    counting.start()
    try:
        for i in range(3000):
            token_ids = np.arange(4, dtype=np.uint32)
            store.feed(f"{i}", token_ids, feed_id="", ngram_mask=2)
            if i % 40 == 39:
                store.finish()
                now_s += 6
        assert store.num_texts > 0
    finally:
        is_over.set()
        counting.join()
        sys.setswitchinterval(interval_s)
    assert errors == []
    store.check_integrity()
