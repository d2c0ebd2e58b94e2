"""Failures that stay alone: logged once, counted, and everything else goes on."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import drafter.batch.engine
import drafter.batch.indexer
import drafter.pools.snapshotter
import drafter.service
from drafter.batch.answer import (
    DRAFT,
    OPEN,
    OUTCOME,
    TEXT_LENGTH,
    WHY_OPEN,
    answer_rows,
    index_texts,
)
from drafter.history.history import History
from drafter.history.lru import StoredHistories
from drafter.history.store import HistoryStore
from drafter.ngram.index import MUST_GROW
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import INDEXED, delta
from tests.drafter.pool_requests import keep_in_pool
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, exchange


def step(base_length: int, num_tokens: int, *names: str) -> pb.ProposeRequest:
    tokens = [i % 7 for i in range(base_length, base_length + num_tokens)]
    return pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=name,
                base_length=base_length,
                token_ids=tokens,
                max_draft_tokens=2,
                params=None if base_length else INDEXED,
            )
            for name in names
        ]
    )


def assert_failed_once(running: RunningDrafter, event: str, reason: str) -> None:
    [entry] = [entry for entry in running.log if entry["log_level"] in ("error", "warning")]
    assert entry["event"] == event
    name = "tandem_drafter_internal_errors_total"
    assert running.sample(name, reason=reason) == 1


def fail_to_index_bad(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the indexer's kernel fail where the sequence "bad" is among its texts."""

    def fail_for_one(headers: Any, *rest: Any) -> None:
        bad = store.by_id.get("bad")
        if bad is not None and bad.address in headers:
            raise MemoryError
        index_texts(headers, *rest)

    monkeypatch.setattr(drafter.batch.indexer, "index_texts", fail_for_one)


async def test_a_text_whose_index_fails_is_forgotten_and_the_others_are_indexed(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    store = running.drafter.store
    fail_to_index_bad(store, monkeypatch)
    stream = running.open_stream()
    names = ("a", "bad", "b")
    for base_length in (0, 40, 80):
        await exchange(stream, step(base_length, 40, *names))
        await running.indexed()
    [a, bad, b] = (await exchange(stream, step(120, 40, *names))).proposals
    await running.indexed()
    assert a.token_ids == b.token_ids == [6, 0]
    assert bad.status == pb.STATUS_OUT_OF_SYNC
    assert [running.histories[name].num_unindexed for name in ("a", "b")] == [0, 0]
    assert_failed_once(running, "sequence_failed", "sequence")


async def test_the_sweep_for_expired_sequences_goes_on_after_a_failure(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter.service, "SWEEP_INTERVAL_S", 0.001)
    running = await start_drafter(idle_ttl_s=10.0)
    store = running.drafter.store
    await running.propose(*step(0, 5, "a").sequences)
    forget_expired, calls = store.forget_expired, itertools.count()
    has_forgotten = asyncio.Event()

    def fail_at_first(max_forgotten: int) -> int:
        if next(calls) == 0:
            raise RuntimeError("at first")
        num_forgotten = forget_expired(max_forgotten)
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


async def test_pools_are_emptied_after_a_failure_and_accept_texts_again(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()
    pools = running.drafter.pools
    texts = [np.arange(10, dtype=np.uint32)] * 2
    with monkeypatch.context() as failing:
        failing.setattr(pools, "work", lambda: 1 // 0)
        pools.feed("p", texts[0], ngram_mask=2)
        await running.drafter.pool_keeper.settle()
    assert pools.num_pools == pools.num_texts == 0
    assert_failed_once(running, "pools_failed", "pools")
    pools.feed("p", texts[1], ngram_mask=2)
    await running.drafter.pool_keeper.settle()
    assert pools.num_tokens == 10


async def test_a_sequence_that_could_not_be_stored_is_forgotten(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = StoredHistories.append

    def fail_for_one(self: StoredHistories, history: History, token_ids: Any) -> None:
        if history.sequence_id == "bad":
            raise MemoryError
        append(self, history, token_ids)

    running = await start_drafter()
    monkeypatch.setattr(StoredHistories, "append", fail_for_one)
    request = step(0, 40, "a", "bad", "b")
    [a, bad, b] = (await exchange(running.open_stream(), request)).proposals
    assert a.token_ids == b.token_ids
    assert (bad.status, bad.message) == (pb.STATUS_INVALID, "internal error")
    assert_failed_once(running, "sequence_failed", "sequence")
    assert set(running.histories) == {"a", "b"}


async def test_a_sequence_that_fails_is_forgotten_and_may_be_sent_again(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_for_unknown_table(
        rows: npt.NDArray[np.int64], first: int, stop: int, *rest: Any
    ) -> int:
        """Asks that a table grow which does not exist, for texts of 13 tokens."""
        num_open = answer_rows(rows, first, stop, *rest)
        failing = np.flatnonzero((rows[first:stop, [TEXT_LENGTH, OUTCOME]] == [13, DRAFT]).all(1))
        rows[failing + first, OUTCOME] = OPEN
        rows[failing + first, WHY_OPEN] = MUST_GROW + 99
        return num_open + len(failing)

    running = await start_drafter()
    monkeypatch.setattr(drafter.batch.engine, "answer_rows", ask_for_unknown_table)
    stream = running.open_stream()
    good = [1, 2, 9, 1, 2]
    request = pb.ProposeRequest(
        sequences=[delta("a", 0, good), delta("bad", 0, [1] * 13), delta("b", 0, good)]
    )
    [a, bad, b] = (await exchange(stream, request)).proposals
    assert list(a.token_ids) == list(b.token_ids) == [9, 1, 2]
    assert (bad.status, bad.message) == (pb.STATUS_INVALID, "internal error")
    [entry] = running.log
    assert entry["event"] == "sequence_failed"
    assert entry["sequence_id"] == "bad"
    assert entry["exc_info"]
    # Its state is in doubt, so it is forgotten; it may be sent again.
    [bad] = (await exchange(stream, pb.ProposeRequest(sequences=[delta("bad", 13, [1])]))).proposals
    assert (bad.status, bad.known_length) == (pb.STATUS_OUT_OF_SYNC, 0)
    [bad] = (await exchange(stream, pb.ProposeRequest(sequences=[delta("bad", 0, good)]))).proposals
    assert list(bad.token_ids) == [9, 1, 2]
    running.drafter.store.check_integrity()


async def test_a_folder_that_goes_away_is_logged_and_drafting_goes_on(
    start_drafter: StartDrafter, tmp_path: Path
) -> None:
    folder = tmp_path / "pools"
    running = await start_drafter(snapshot_dir=folder)
    folder.rmdir()
    folder.write_bytes(b"")
    await keep_in_pool(running, [1, 2, 3])
    await running.drafter.drain()
    [failed] = [entry for entry in running.log if entry["event"] == "snapshot_failed"]
    assert failed["folder"] == str(folder)
    assert running.sample("tandem_drafter_snapshots_total", outcome="failed") == 1
