"""Batches whose rows differ: created, appended to, refused, or evicted."""

import asyncio
import gc
from typing import Any

import grpc
import pytest

import drafter.batch.engine
import drafter.batch.indexer
from drafter.batch import wire
from drafter.batch.answer import TEXT as TEXT_AT
from drafter.batch.answer import answer_rows
from drafter.batch.time_slices import TimeSlice
from drafter.history.history import History
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import delta
from tests.drafter.local_drafter import LocalDrafter
from tests.drafter.running_drafter import RunningDrafter, StartDrafter

TEXT = [1, 2, 9, 1, 2]


def request_of(*deltas: pb.SequenceDelta, **fields: Any) -> pb.ProposeRequest:
    return pb.ProposeRequest(sequences=deltas, **fields)


def drafted(
    sequence_id: str, base_length: int, token_ids: list[int], match_length: int
) -> pb.Proposal:
    return pb.Proposal(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=token_ids,
        matched_ngram_length=match_length,
        source=pb.SOURCE_SEQUENCE,
        status=pb.STATUS_OK,
    )


def out_of_sync(sequence_id: str, known_length: int = 0) -> pb.Proposal:
    return pb.Proposal(
        sequence_id=sequence_id, status=pb.STATUS_OUT_OF_SYNC, known_length=known_length
    )


@pytest.fixture(params=[False, True], ids=["one slice", "a pause after every row"])
def one_slice_or_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test with a batch in one time slice, and with one that pauses wherever it may."""
    if request.param:
        monkeypatch.setattr(TimeSlice, "is_over", True)


@pytest.mark.usefixtures("one_slice_or_many")
async def test_refusals_and_drafts_are_answered_in_the_order_of_the_rows() -> None:
    local = LocalDrafter()
    firsts = {"a": 0, "b": 10, "c": 20, "d": 30, "e": 40}
    texts = {name: [k, k + 1, k + 2, k, k + 1] for name, k in firsts.items()}
    await local.exchange(request_of(*[delta(name, 0, texts[name], 0) for name in texts]))
    response = await local.exchange(
        request_of(
            delta("a", 5, [2]),
            delta("unknown", 3, [1], 200),
            delta("b", 5, [12], 2),
            delta("c", 7, [9], 200),
            delta("invalid", 0, [1], 200, params=pb.NgramParams(min_ngram=0)),
            delta("d", 5, [32]),
            delta("e", 5, [99], 200),
            delta("f", 0, TEXT),
            batch_id=5,
        )
    )
    assert response == pb.ProposeResponse(
        batch_id=5,
        proposals=[
            drafted("a", 6, [0, 1, 2], 3),
            out_of_sync("unknown"),
            drafted("b", 6, [10, 11], 3),
            out_of_sync("c", known_length=5),
            pb.Proposal(
                sequence_id="invalid",
                status=pb.STATUS_INVALID,
                message="params.min_ngram: 0 is under 1",
            ),
            drafted("d", 6, [30, 31, 32], 3),
            pb.Proposal(sequence_id="e", base_length=6, status=pb.STATUS_NO_MATCH),
            drafted("f", 5, [9, 1, 2], 2),
        ],
    )


@pytest.mark.usefixtures("one_slice_or_many")
async def test_a_row_whose_kernel_fails_is_refused_though_its_draft_had_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = LocalDrafter()
    await local.exchange(request_of(*[delta(name, 0, TEXT) for name in ("a", "bad", "b")]))
    bad = local.histories["bad"].address

    def fail_for_one(rows: Any, first: int, stop: int, *rest: Any) -> int:
        if bad in rows[first:stop, TEXT_AT]:
            raise MemoryError
        return answer_rows(rows, first, stop, *rest)

    monkeypatch.setattr(drafter.batch.engine, "answer_rows", fail_for_one)
    response = await local.exchange(
        request_of(delta("a", 5, [9]), delta("bad", 5, [9], 200), delta("b", 5, [9]))
    )
    assert list(response.proposals) == [
        drafted("a", 6, [1, 2, 9], 3),
        pb.Proposal(sequence_id="bad", status=pb.STATUS_INVALID, message="internal error"),
        drafted("b", 6, [1, 2, 9], 3),
    ]
    assert local.drafter.store.num_sequences == 2
    local.drafter.store.check_integrity()


async def exchange_bytes(running: RunningDrafter, payload: bytes) -> bytes:
    """One exchange on a new stream."""
    stream = running.open_bytes_stream()
    await stream.write(payload)
    response = await stream.read()
    assert isinstance(response, bytes), "the stream has ended"
    return response


async def test_the_answer_to_the_largest_batch_keeps_to_the_message_limit(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    names = [f"{i:064}" for i in range(wire.MAX_SEQUENCES_PER_BATCH)]
    token = 2**32 - 1
    for start in range(0, len(names), 1024):
        await running.propose(*[delta(n, 0, [token] * 100, 0) for n in names[start : start + 1024]])
    deltas = []
    for i, name in enumerate(names):
        if i % 64 == 0:
            deltas.append(delta(name, 200, [token], 2**32 - 1))
        elif i % 64 == 1:
            deltas.append(delta(name, 0, [token] * 40, 2**32 - 1))
        elif i % 64 == 2:
            params = pb.NgramParams(min_ngram=9, max_ngram=8)
            deltas.append(delta(name, 0, [token], 2**32 - 1, params=params))
        else:
            deltas.append(delta(name, 100, [token], 2**32 - 1))
    response = await exchange_bytes(running, request_of(*deltas).SerializeToString())
    assert len(response) <= wire.MAX_MESSAGE_BYTES
    proposals = pb.ProposeResponse.FromString(response).proposals
    assert [proposal.sequence_id for proposal in proposals] == names
    longest_draft = [token] * wire.max_draft_tokens(len(names))
    for i, proposal in enumerate(proposals):
        if i % 64 == 0:
            assert proposal == out_of_sync(names[i], known_length=100)
        elif i % 64 == 2:
            assert proposal.status == pb.STATUS_INVALID
        else:
            assert proposal.base_length == (40 if i % 64 == 1 else 101)
            assert list(proposal.token_ids) == longest_draft
    running.drafter.store.check_integrity()


class LeavingClient:
    """The server's side of a stream whose client leaves before its answer is written."""

    def __init__(self, request: pb.ProposeRequest, error: BaseException) -> None:
        self._request = request
        self._error = error

    async def read(self) -> bytes:
        return self._request.SerializeToString()

    async def write(self, response: bytes) -> None:
        raise self._error


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.UsageError("it is over")])
async def test_a_text_is_indexed_though_its_client_left_before_the_answer(
    error: BaseException,
) -> None:
    local = LocalDrafter()
    client = LeavingClient(request_of(delta("a", 0, range(100), 0)), error)
    with pytest.raises(type(error)):
        await local.drafter.servicer.ProposeStream(None, client)  # type: ignore[arg-type]
    await local.settle()
    assert local.histories["a"].num_unindexed <= 5
    assert sum(number or 0 for number in local.num_proposals()) == 1


async def test_releases_come_before_creations_of_the_same_ids() -> None:
    local = LocalDrafter()
    in_pool = pb.NgramParams(pool_id="p")
    await local.exchange(request_of(*[delta(name, 0, TEXT, params=in_pool) for name in "abc"]))
    keep, again = pb.Release(sequence_id="a", keep=pb.KEEP_ALL), pb.Release(sequence_id="a")
    response = await local.exchange(
        request_of(
            delta("a", 0, [7, 8, 6, 7, 8], params=in_pool),
            delta("b", 5, [9]),
            delta("c", 0, [3, 4]),
            releases=[keep, again, pb.Release(sequence_id="b"), pb.Release(sequence_id="new")],
        )
    )
    assert list(response.proposals) == [
        drafted("a", 5, [6, 7, 8], 2),
        out_of_sync("b"),
        pb.Proposal(sequence_id="c", base_length=2, status=pb.STATUS_NO_MATCH),
    ]
    await local.settle()
    [kept] = local.drafter.pools.texts_of("p")
    assert kept.token_ids.tolist() == TEXT, "the released text, and not the new one"
    known = local.histories
    assert {name: known[name].token_ids.tolist() for name in known} == {
        "a": [7, 8, 6, 7, 8],
        "c": [3, 4],
    }
    local.drafter.store.check_integrity()


@pytest.mark.usefixtures("one_slice_or_many")
async def test_a_row_whose_sequence_a_later_creation_evicts_is_answered_all_the_same() -> None:
    local = LocalDrafter(max_sequences=3)
    await local.exchange(request_of(*[delta(name, 0, TEXT) for name in "abc"]))
    response = await local.exchange(
        request_of(
            *[delta(name, 5, [9]) for name in "bac"],
            delta("d", 0, [4, 5, 4, 5]),
            delta("e", 0, [6, 7]),
        )
    )
    assert list(response.proposals) == [
        *[drafted(name, 6, [1, 2, 9], 3) for name in "bac"],
        drafted("d", 4, [4, 5], 2),
        pb.Proposal(sequence_id="e", base_length=2, status=pb.STATUS_NO_MATCH),
    ]
    assert set(local.histories) == {"c", "d", "e"}
    await local.settle()
    local.drafter.store.check_integrity()


async def test_an_answered_batch_keeps_no_released_text_in_memory() -> None:
    """A stream may be idle for hours."""
    local = LocalDrafter()
    await local.exchange(request_of(delta("released", 0, TEXT)))
    await local.settle()
    assert local.drafter.store.release("released") is not None
    gc.collect()
    histories = [known for known in gc.get_objects() if type(known) is History]
    assert "released" not in [history.sequence_id for history in histories]
