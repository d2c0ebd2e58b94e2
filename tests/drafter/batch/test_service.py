"""Propose, ProposeStream, Release and GetDrafterLoad over a real connection."""

import random

import grpc

from drafter.ngram.params import DEFAULT_PARAMS
from tandem.v1 import drafter_pb2 as pb
from tests.drafter import brute_force
from tests.drafter.deltas import INDEXED, delta
from tests.drafter.running_drafter import StartDrafter, exchange
from tests.drafter.texts import EMPTY_BYTES


async def test_every_sequence_of_a_batch_is_answered_in_order(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    proposals = await running.propose(
        delta("repeats", 0, [1, 2, 9, 1, 2]),
        delta("does not", 0, [1, 2, 3]),
        delta("append only", 0, [1, 2, 9, 1, 2], max_draft_tokens=0),
        delta("unknown", 5, [1]),
        delta("invalid", 0, [1], params=pb.NgramParams(min_ngram=0)),
        delta("no room", 0, [1, 2, 9, 1, 2], max_length=5),
        delta("little room", 0, [1, 2, 9, 1, 2], max_length=6),
        delta("no room either", 0, [1, 2, 9, 1, 2], max_length=4),
    )
    assert [(p.sequence_id, pb.Status.Name(p.status), list(p.token_ids)) for p in proposals] == [
        ("repeats", "STATUS_OK", [9, 1, 2]),
        ("does not", "STATUS_NO_MATCH", []),
        ("append only", "STATUS_OK", []),
        ("unknown", "STATUS_OUT_OF_SYNC", []),
        ("invalid", "STATUS_INVALID", []),
        ("no room", "STATUS_NO_MATCH", []),
        ("little room", "STATUS_OK", [9]),
        ("no room either", "STATUS_NO_MATCH", []),
    ]
    assert [p.base_length for p in proposals] == [5, 3, 5, 0, 0, 5, 5, 5]
    assert proposals[4].message == "params.min_ngram: 0 is under 1"
    assert all(p.source == pb.SOURCE_UNSPECIFIED for p in proposals[1:6])
    assert all(p.matched_ngram_length == 0 for p in proposals[1:6])


async def test_an_invalid_sequence_is_not_created_nor_changed(start_drafter: StartDrafter) -> None:
    running = await start_drafter(max_sequence_bytes=40 + EMPTY_BYTES)
    kmp = pb.NgramParams(algorithm=pb.ALGORITHM_KMP)
    await running.propose(delta("a", 0, [1, 2, 3], params=kmp))
    for refused in (
        delta("a", 0, [9], params=pb.NgramParams(min_ngram=5, max_ngram=4)),
        delta("a", 0, [9], prompt_length=11, params=kmp),
        delta("a", 0, [9], params=INDEXED),
        delta("a", 3, [9] * 8),
        delta("b", 0, [9], params=pb.NgramParams(min_ngram=5, max_ngram=4)),
    ):
        [proposal] = await running.propose(refused)
        assert proposal.status == pb.STATUS_INVALID
        assert proposal.message
    [a, b] = await running.propose(delta("a", 3, []), delta("b", 1, []))
    assert (a.status, a.base_length) == (pb.STATUS_NO_MATCH, 3)
    assert (b.status, b.known_length) == (pb.STATUS_OUT_OF_SYNC, 0)


async def test_out_of_sync_says_from_where_to_send_again(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await running.propose(delta("a", 0, [1, 2, 3]))
    cases = [
        (delta("a", 4, [5]), 3),  # a gap
        (delta("a", 2, [9]), 0),  # contradicts the known tokens
        (delta("b", 3, [1]), 0),  # unknown
    ]
    for sent, known_length in cases:
        [proposal] = await running.propose(sent)
        assert proposal.status == pb.STATUS_OUT_OF_SYNC
        assert proposal.known_length == known_length
        assert not proposal.token_ids
    [proposal] = await running.propose(delta("a", 3, [1, 2]))
    assert (proposal.status, list(proposal.token_ids)) == (pb.STATUS_OK, [3, 1, 2])


async def test_a_stream_answers_each_batch_in_order(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    for batch_id in range(20):
        sequence = delta("a", batch_id * 2, [1, batch_id])
        await stream.write(pb.ProposeRequest(batch_id=batch_id, sequences=[sequence]))
    await stream.done_writing()
    answers = [response async for response in stream]
    assert [answer.batch_id for answer in answers] == list(range(20))
    assert [answer.proposals[0].base_length for answer in answers] == list(range(2, 42, 2))
    assert await stream.code() == grpc.StatusCode.OK


async def test_random_conversations_equal_the_oracle(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    rng = random.Random(5)
    texts: dict[str, list[int]] = {f"s{i}": [] for i in range(20)}
    num_drafts = 0
    for batch_id in range(40):
        chosen = rng.sample(sorted(texts), rng.randint(1, 20))
        deltas = []
        for sequence_id in chosen:
            known = texts[sequence_id]
            base_length = rng.randint(max(0, len(known) - 3), len(known))
            new = [rng.randrange(3) for _ in range(rng.randrange(6))]
            deltas.append(delta(sequence_id, base_length, known[base_length:] + new))
            known += new
        response = await exchange(stream, pb.ProposeRequest(batch_id=batch_id, sequences=deltas))
        assert [p.sequence_id for p in response.proposals] == chosen
        for proposal in response.proposals:
            known = texts[proposal.sequence_id]
            expected = brute_force.propose(known, DEFAULT_PARAMS, 4)
            assert proposal.base_length == len(known)
            draft, match_length = expected or ([], 0)
            assert list(proposal.token_ids) == draft
            assert proposal.matched_ngram_length == match_length
            num_drafts += bool(draft)
    assert num_drafts > 100


async def test_the_load_is_reported(start_drafter: StartDrafter) -> None:
    running = await start_drafter(max_sequences=9, max_history_bytes=1 << 26)
    kmp = pb.NgramParams(algorithm=pb.ALGORITHM_KMP)
    await running.propose(delta("a", 0, [1] * 300, params=kmp), delta("b", 0, [1], params=kmp))
    load = await running.load()
    assert (load.num_sequences, load.max_sequences) == (2, 9)
    assert (load.history_bytes, load.max_history_bytes) == (
        512 * 4 + 256 * 4 + 2 * EMPTY_BYTES,
        1 << 26,
    )
    assert load.pool_bytes == 0
    assert len(load.instance_id) == 32
    other = await start_drafter()
    assert (await other.load()).instance_id != load.instance_id


async def test_metrics_count_proposals_by_outcome(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    await exchange(
        stream,
        pb.ProposeRequest(
            sequences=[
                delta("a", 0, [1, 2, 1, 2]),
                delta("b", 0, [1, 2, 1, 2]),
                delta("c", 0, [1]),
                delta("d", 0, [1], max_draft_tokens=0),
                delta("e", 3, [1]),
                delta("f", 0, [1], params=pb.NgramParams(pool_id="p" * 257)),
            ]
        ),
    )
    for (outcome, source), count in {
        ("draft", "sequence"): 2,
        ("no_match", "none"): 1,
        ("appended", "none"): 1,
        ("out_of_sync", "none"): 1,
        ("invalid", "none"): 1,
    }.items():
        name = "tandem_drafter_proposals_total"
        assert running.sample(name, outcome=outcome, source=source) == count
    assert running.sample("tandem_drafter_sequences") == 4
    running.drafter.store.check_integrity()
    assert running.sample("tandem_drafter_history_bytes") == (await running.load()).history_bytes
    assert running.sample("tandem_drafter_proposal_seconds_count") == 1
    for reason in ("sequences", "bytes", "idle", "stream_ended"):
        assert running.sample("tandem_drafter_evictions_total", reason=reason) == 0


async def test_drafts_of_a_batch_share_the_message_limit(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    ids = [f"s{i}" for i in range(64)]
    for half in (ids[:32], ids[32:]):
        await running.propose(*[delta(s, 0, [2**32 - 1] * 4000, 0) for s in half])
    request = pb.ProposeRequest(sequences=[delta(s, 4000, [], 2**32 - 1) for s in ids])
    response = await running.stub.Propose(request)
    lengths = {len(proposal.token_ids) for proposal in response.proposals}
    assert len(lengths) == 1
    assert lengths.pop() > 3000
    assert response.ByteSize() <= 1 << 20
