"""Shared pools over a real connection: which texts are kept, and who drafts from them."""

from typing import Any

import pytest

from tandem.v1 import drafter_pb2 as pb
from tests.drafter.pool_requests import NOTHING, draft_of, keep_in_pool, pool_delta
from tests.drafter.running_drafter import StartDrafter, exchange


async def test_a_feed_id_feeds_once(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await keep_in_pool(running, [1, 2, 3], feed_id="x")
    await keep_in_pool(running, [1, 2, 4], feed_id="x")
    assert await draft_of(running, [1, 2], tie=pb.TIE_LATEST) == ([3], 2, pb.SOURCE_POOL)
    assert running.sample("tandem_drafter_pool_feeds_total", outcome="duplicate") == 1
    # The same id in another pool is another text.
    await keep_in_pool(running, [1, 2, 4], feed_id="x", pool_id="q")
    assert await draft_of(running, [1, 2], pool_id="q") == ([4], 2, pb.SOURCE_POOL)


async def test_a_kept_text_is_drafted_from(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await keep_in_pool(running, [1, 2, 3, 4, 5, 6])
    assert await draft_of(running, [9, 2, 3, 4]) == ([5, 6], 3, pb.SOURCE_POOL)
    assert running.sample("tandem_drafter_proposals_total", outcome="draft", source="pool") == 1
    assert running.sample("tandem_drafter_pool_feeds_total", outcome="kept") == 1
    load = await running.load()
    assert load.pool_bytes == running.sample("tandem_drafter_pool_bytes") > 0


async def test_a_text_is_kept_by_a_release_on_a_stream_too(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    await exchange(stream, pb.ProposeRequest(sequences=[pool_delta("a", [1, 2, 3, 4, 5])]))
    release = pb.Release(sequence_id="a", keep=pb.KEEP_ALL)
    await exchange(stream, pb.ProposeRequest(releases=[release]))
    await running.drafter.pool_keeper.settle()
    asking = pb.ProposeRequest(sequences=[pool_delta("b", [1, 2])])
    [proposal] = (await exchange(stream, asking)).proposals
    assert (list(proposal.token_ids), proposal.source) == ([3, 4, 5], pb.SOURCE_POOL)


async def test_a_release_says_which_part_of_the_text_is_kept(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    text = [1, 2, 3, 4, 5, 6, 7]
    await keep_in_pool(running, text, pool_id="all", keep=pb.KEEP_ALL, prompt_length=4)
    await keep_in_pool(running, text, pool_id="output", keep=pb.KEEP_OUTPUT, prompt_length=4)
    await keep_in_pool(running, text, pool_id="nothing", keep=pb.KEEP_NOTHING, prompt_length=4)
    await keep_in_pool(running, text, pool_id="unspecified", keep=pb.KEEP_UNSPECIFIED)
    assert await draft_of(running, [2, 3], pool_id="all") == ([4, 5, 6, 7], 2, pb.SOURCE_POOL)
    assert await draft_of(running, [5, 6], pool_id="all") == ([7], 2, pb.SOURCE_POOL)
    assert await draft_of(running, [2, 3], pool_id="output") == NOTHING
    # A match does not go back into a prompt that was not kept, either.
    assert await draft_of(running, [4, 5, 6], pool_id="output") == ([7], 2, pb.SOURCE_POOL)
    for pool_id in ("nothing", "unspecified"):
        assert await draft_of(running, [5, 6], pool_id=pool_id) == NOTHING
    assert running.drafter.pools.num_pools == 2


async def test_the_pool_drafts_where_the_own_match_is_under_pool_min_ngram(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await keep_in_pool(running, [6, 7, 8, 9, 50, 51])
    own = [8, 9, 40, 6, 7, 8, 9]  # its own match has 2 tokens, the pool's 4
    drafted = {
        pool_min_ngram: await draft_of(running, own, pool_min_ngram=pool_min_ngram)
        for pool_min_ngram in (0, 2, 3, 64)
    }
    of_sequence = ([40, 6, 7, 8, 9], 2, pb.SOURCE_SEQUENCE)
    of_pool = ([50, 51], 4, pb.SOURCE_POOL)
    assert drafted == {0: of_sequence, 2: of_sequence, 3: of_pool, 64: of_pool}


async def test_with_the_longest_tie_all_places_compete_by_match_length(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await keep_in_pool(running, [5, 6, 7, 8, 9, 50, 51, 52])
    await keep_in_pool(running, [7, 8, 9, 60, 61])
    longest: dict[str, Any] = {"tie": pb.TIE_LONGEST, "tokens_per_match": 0}
    cases: list[tuple[list[int], tuple[list[int], int, int]]] = [
        # Match lengths: the pool's latest occurrence 3, its earliest 5; the own text 2.
        ([8, 9, 40, 5, 6, 7, 8, 9], ([50, 51, 52], 5, pb.SOURCE_POOL)),
        # At equal match lengths the later one of the pool's.
        ([4, 7, 8, 9], ([60, 61], 3, pb.SOURCE_POOL)),
        # At equal match lengths the own text comes first.
        ([7, 8, 9, 41, 7, 8, 9], ([41, 7, 8, 9], 3, pb.SOURCE_SEQUENCE)),
    ]
    for context, expected in cases:
        assert await draft_of(running, context, **longest) == expected
    # A draft holds so many tokens per token of its match.
    limited = {**longest, "tokens_per_match": 1}
    await keep_in_pool(running, list(range(100, 130)))
    assert await draft_of(running, [100, 101], **limited) == ([102, 103], 2, pb.SOURCE_POOL)


@pytest.mark.parametrize("algorithm", [pb.ALGORITHM_INDEX, pb.ALGORITHM_KMP])
async def test_many_sequences_of_one_batch_draft_each_from_its_own_pool(
    start_drafter: StartDrafter, algorithm: "pb.Algorithm.ValueType"
) -> None:
    running = await start_drafter()
    for i in range(10):
        await keep_in_pool(running, [1, 2, 100 + i], pool_id=f"p{i}")
    deltas = [
        pool_delta(f"s{i}", [9, 1, 2], pool_id=f"p{i % 20}" if i % 3 else "", algorithm=algorithm)
        for i in range(600)
    ]
    for i, proposal in enumerate(await running.propose(*deltas)):
        has_text = i % 3 != 0 and i % 20 < 10
        assert list(proposal.token_ids) == ([100 + i % 20] if has_text else [])
        assert proposal.source == (pb.SOURCE_POOL if has_text else pb.SOURCE_UNSPECIFIED)


async def test_drafts_from_a_pool_keep_the_limits_of_length(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await keep_in_pool(running, list(range(1, 30)))
    sent = pool_delta("asking", [1, 2])
    for max_draft_tokens, max_length, expected in ((3, 0, 3), (8, 4, 2), (8, 2, 0), (0, 0, 0)):
        sent.max_draft_tokens, sent.max_length = max_draft_tokens, max_length
        [proposal] = await running.propose(sent)
        assert list(proposal.token_ids) == [3, 4, 5][:expected]


async def test_tokens_beyond_a_released_length_are_not_kept(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    text = list(range(100, 110))
    for sequence_id, pool_id, length in (("a", "cut", 5), ("b", "whole", 0)):
        await running.propose(pool_delta(sequence_id, text, pool_id=pool_id))
        release = pb.Release(sequence_id=sequence_id, keep=pb.KEEP_ALL, length=length)
        await running.stub.Release(pb.ReleaseRequest(releases=[release]))
    await running.drafter.pool_keeper.settle()
    assert await draft_of(running, text[:2], pool_id="cut") == (text[2:5], 2, pb.SOURCE_POOL)
    assert await draft_of(running, text[:2], pool_id="whole") == (text[2:], 2, pb.SOURCE_POOL)
