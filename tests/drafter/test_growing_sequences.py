"""Sequences that feed their pool while they grow, over a real connection."""

import asyncio
from typing import Any

import grpc
import pytest

from drafter.pools.store import PoolStore
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.pool_requests import NOTHING, draft_of, keep_in_pool, pool_delta
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, exchange


def growing(
    token_ids: list[int], *, base_length: int = 0, every: int = 16, **options: Any
) -> pb.SequenceDelta:
    """A delta of a sequence that feeds its pool while it grows."""
    grown = pool_delta("growing", token_ids[base_length:], pool_feed_tokens=every, **options)
    grown.base_length = base_length
    return grown


async def grow(
    running: RunningDrafter, token_ids: list[int], *, step: int, first: int = 4, **options: Any
) -> None:
    """Lets a sequence grow to this text over a stream, step by step."""
    stream = running.open_stream()
    length = min(first, len(token_ids))
    created = growing(token_ids[:length], **options)
    await exchange(stream, pb.ProposeRequest(sequences=[created]))
    while length < len(token_ids):
        end = min(length + step, len(token_ids))
        piece = growing(token_ids[:end], base_length=length)
        await exchange(stream, pb.ProposeRequest(sequences=[piece]))
        length = end
    # The indexer may start on a batch's texts only after the client has the answer.
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    await settle_feeds(running)


async def settle_feeds(running: RunningDrafter) -> None:
    """Returns when all pools have been fed, and have indexed their texts."""
    indexer = running.drafter.servicer.engine.indexer
    async with asyncio.timeout(20):
        while indexer.has_work:  # noqa: ASYNC110 - the indexer has no event to wait for
            await asyncio.sleep(0.001)
    await running.drafter.pool_keeper.settle()


TEXT = list(range(100, 200))


@pytest.mark.parametrize("algorithm", [pb.ALGORITHM_INDEX, pb.ALGORITHM_KMP])
async def test_a_sequence_feeds_its_pool_while_it_grows(
    start_drafter: StartDrafter, algorithm: "pb.Algorithm.ValueType"
) -> None:
    running = await start_drafter()
    await grow(running, TEXT, step=3, algorithm=algorithm)
    # All but the last few of its 100 tokens are in the pool before its release.
    drafts = [await draft_of(running, TEXT[place - 3 : place]) for place in range(3, 76)]
    assert drafts == [(TEXT[place : place + 8], 3, pb.SOURCE_POOL) for place in range(3, 76)]
    running.drafter.pools.check_integrity()
    release = pb.Release(sequence_id="growing", keep=pb.KEEP_OUTPUT, feed_id="any")
    await running.stub.Release(pb.ReleaseRequest(releases=[release]))
    await running.drafter.pool_keeper.settle()
    assert await draft_of(running, TEXT[93:95]) == (TEXT[95:], 2, pb.SOURCE_POOL)
    assert running.sample("tandem_drafter_pool_feeds_total", outcome="kept") >= 5


async def test_a_sequence_of_unary_calls_feeds_its_pool_while_it_grows(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await running.propose(growing(TEXT[:10]))
    await running.propose(growing(TEXT[:50], base_length=10))
    await settle_feeds(running)
    assert await draft_of(running, TEXT[:3]) == (TEXT[3:11], 3, pb.SOURCE_POOL)


async def test_pool_keep_says_which_part_of_a_growing_text_is_fed(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    for pool_id, keep in (("output", pb.KEEP_UNSPECIFIED), ("all", pb.KEEP_ALL)):
        await grow(
            running, TEXT, step=3, first=40, pool_id=pool_id, prompt_length=40, pool_keep=keep
        )
    assert await draft_of(running, TEXT[:3], pool_id="all") == (TEXT[3:11], 3, pb.SOURCE_POOL)
    assert await draft_of(running, TEXT[:3], pool_id="output") == NOTHING
    assert await draft_of(running, TEXT[50:53], pool_id="output") == (
        TEXT[53:61],
        3,
        pb.SOURCE_POOL,
    )


async def test_a_release_that_keeps_nothing_leaves_earlier_feeds(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await grow(running, TEXT[:50], step=3, first=17)
    release = pb.Release(sequence_id="growing", keep=pb.KEEP_NOTHING)
    await running.stub.Release(pb.ReleaseRequest(releases=[release]))
    await running.drafter.pool_keeper.settle()
    assert await draft_of(running, TEXT[:3]) == (TEXT[3:11], 3, pb.SOURCE_POOL)
    assert await draft_of(running, TEXT[46:48]) == NOTHING


async def test_a_replayed_history_feeds_nothing_twice(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    for _ in range(3):
        await grow(running, TEXT, step=3)
        num_tokens = running.drafter.pools.num_tokens
        num_texts = running.drafter.pools.num_texts
        # Each piece overlaps the one before by up to 64 tokens.
        assert num_tokens - 64 * (num_texts - 1) <= len(TEXT)
    release = pb.Release(sequence_id="growing", keep=pb.KEEP_ALL, feed_id="growing")
    await running.stub.Release(pb.ReleaseRequest(releases=[release]))
    await grow(running, TEXT, step=3)
    # The release feeds the remaining tokens, if there are any.
    assert num_texts <= running.drafter.pools.num_texts <= num_texts + 1
    assert await draft_of(running, TEXT[:3], tie=pb.TIE_LATEST) == (TEXT[3:11], 3, pb.SOURCE_POOL)


async def test_a_growing_sequence_s_own_pieces_hide_no_longer_match_of_others(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await keep_in_pool(running, [*range(1, 9), 50, 51])
    # In the pool, its own text has the latest occurrence, with a shorter match.
    text = [99, *range(3, 9), *range(60, 90), *range(1, 9)]
    options: dict[str, Any] = {"tie": pb.TIE_LATEST, "pool_min_ngram": 64}
    await grow(running, text[:-1], step=3, **options)
    [proposal] = await running.propose(growing(text, base_length=len(text) - 1))
    assert (list(proposal.token_ids), proposal.matched_ngram_length, proposal.source) == (
        [50, 51],
        8,
        pb.SOURCE_POOL,
    )
    # Other sequences do draft from it.
    assert await draft_of(running, text[-8:], **options) == (list(range(60, 68)), 6, pb.SOURCE_POOL)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pool_feed_tokens": 15}, "params.pool_feed_tokens"),
        ({"pool_feed_tokens": 16, "pool_id": ""}, "params.pool_feed_tokens"),
        ({"pool_feed_tokens": 16, "pool_keep": pb.KEEP_NOTHING}, "params.pool_keep"),
        ({"pool_keep": 99}, "params.pool_keep"),
    ],
)
async def test_contradictory_feeding_options_are_refused_by_name(
    start_drafter: StartDrafter, options: dict[str, Any], field: str
) -> None:
    running = await start_drafter()
    [proposal] = await running.propose(pool_delta("odd", [1, 2, 3], **options))
    assert proposal.status == pb.STATUS_INVALID
    assert proposal.message.startswith(f"{field}: ")


async def test_a_sequence_whose_feeding_fails_is_forgotten_alone(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter()

    def fail(self: PoolStore, *arguments: object, **keywords: object) -> int:
        raise MemoryError("no room for a secret")

    with monkeypatch.context() as patch:
        patch.setattr(PoolStore, "grow", fail)
        await grow(running, TEXT[:40], step=40, first=4)
    assert (await running.load()).num_sequences == 0
    await grow(running, TEXT, step=3)
    assert await draft_of(running, TEXT[:3]) == (TEXT[3:11], 3, pb.SOURCE_POOL)
