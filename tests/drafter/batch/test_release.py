"""Releases of sequences, in calls and on streams."""

import grpc
import pytest

from servicekit.errors import field_violation
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import delta
from tests.drafter.running_drafter import StartDrafter, exchange


async def test_released_sequences_are_unknown(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await running.propose(*[delta(sequence_id, 0, [1]) for sequence_id in "abc"])
    await running.stub.Release(
        pb.ReleaseRequest(
            releases=[
                pb.Release(sequence_id="a"),
                pb.Release(sequence_id="never seen", keep=pb.KEEP_NOTHING),
            ]
        )
    )
    assert (await running.load()).num_sequences == 2
    stream = running.open_stream()
    request = pb.ProposeRequest(
        releases=[pb.Release(sequence_id="b"), pb.Release(sequence_id="c")],
        sequences=[delta("a", 1, [2]), delta("b", 1, [2]), delta("c", 0, [1, 2])],
    )
    proposals = (await exchange(stream, request)).proposals
    # Releases come before deltas: c is created again.
    assert [(p.status, p.known_length) for p in proposals] == [
        (pb.STATUS_OUT_OF_SYNC, 0),
        (pb.STATUS_OUT_OF_SYNC, 0),
        (pb.STATUS_NO_MATCH, 0),
    ]
    assert (await running.load()).num_sequences == 1


async def test_a_release_tells_how_many_texts_their_pools_have(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    in_pool = pb.NgramParams(pool_id="p")

    async def release(feed_id: str) -> int:
        for sequence_id, params in (("a", in_pool), ("b", None), ("c", in_pool), ("d", in_pool)):
            created = pb.SequenceDelta(sequence_id=sequence_id, token_ids=[1, 2, 3], params=params)
            await running.propose(created)
        releases = [pb.Release(sequence_id=each, keep=pb.KEEP_ALL) for each in ("b", "absent")]
        releases += [pb.Release(sequence_id="c"), pb.Release(sequence_id="d", keep=pb.KEEP_ALL)]
        releases.append(pb.Release(sequence_id="a", keep=pb.KEEP_ALL, feed_id=feed_id))
        return (await running.stub.Release(pb.ReleaseRequest(releases=releases))).num_kept

    assert await release("f") == 2
    assert await release("f") == 2, "a text that was there before counts"


def release_of_a_newer_client(sequence_id: str) -> pb.Release:
    """`keep` is 77, which is in no enum; the Python API refuses to make one, the wire does not."""
    number = pb.Release.DESCRIPTOR.fields_by_name["keep"].number
    release = pb.Release(sequence_id=sequence_id)
    return pb.Release.FromString(release.SerializeToString() + bytes([number << 3, 77]))


async def test_an_unknown_keep_is_refused_by_name_in_a_call(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    await running.propose(delta("a", 0, [1]))
    releases = [pb.Release(sequence_id="a"), release_of_a_newer_client("b")]
    for call in (
        running.stub.Release(pb.ReleaseRequest(releases=releases)),
        running.stub.Propose(pb.ProposeRequest(releases=releases)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
        field, description = field_violation(error.value) or ("", "")
        assert field == "releases[1].keep"
        assert "77" in description
    assert (await running.load()).num_sequences == 1, "nothing of the request was applied"


async def test_an_unknown_keep_does_not_end_a_stream(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    in_pool = pb.NgramParams(pool_id="p")
    for sequence_id in "ab":
        created = pb.SequenceDelta(sequence_id=sequence_id, token_ids=[1, 2, 3], params=in_pool)
        await exchange(stream, pb.ProposeRequest(sequences=[created]))
    for sequence_id in "ab":
        release = release_of_a_newer_client(sequence_id)
        await exchange(stream, pb.ProposeRequest(releases=[release]))
    load = await running.load()
    assert (load.num_sequences, load.pool_bytes) == (0, 0)
    assert running.log == [
        {
            "event": "release_keeps_nothing",
            "log_level": "warning",
            "field": "releases[0].keep",
            "value": "77",
        }
    ], "once per stream"


async def test_a_release_that_names_no_sequence_fails_alone_on_a_stream(
    start_drafter: StartDrafter,
) -> None:
    running = await start_drafter()
    stream = running.open_stream()
    for sequence_id in "abc":
        await exchange(
            stream, pb.ProposeRequest(sequences=[delta(sequence_id, 0, [1, 2, 9, 1, 2])])
        )
    bad = [pb.Release(), pb.Release(sequence_id="x" * 65)]
    for sequence_id, other in ("ac", "bc"):
        request = pb.ProposeRequest(
            sequences=[delta(other, 5, [])], releases=[*bad, pb.Release(sequence_id=sequence_id)]
        )
        response = await exchange(stream, request)
        assert list(response.proposals[0].token_ids) == [9, 1, 2]
    # All releases of this message are malformed.
    await exchange(stream, pb.ProposeRequest(sequences=[delta("c", 0, [1])], releases=bad))
    assert (await running.load()).num_sequences == 1
    assert [entry["event"] for entry in running.log] == ["release_names_no_sequence"]
    assert running.sample("tandem_drafter_internal_errors_total", reason="release") == 6


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_release_whose_text_cannot_be_kept_fails_alone(
    start_drafter: StartDrafter, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    running = await start_drafter()
    pools = running.drafter.pools
    for sequence_id in ("bad", "good"):
        created = delta(sequence_id, 0, [1, 2, 3])
        created.params.pool_id = sequence_id
        await running.propose(created)
    feed = pools.feed

    def fail_for_one(pool_id: str, *arguments: object, **options: object) -> object:
        if pool_id == "bad":
            raise MemoryError
        return feed(pool_id, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pools, "feed", fail_for_one)
    releases = [pb.Release(sequence_id=name, keep=pb.KEEP_ALL) for name in ("bad", "good")]
    if is_stream:
        await exchange(running.open_stream(), pb.ProposeRequest(releases=releases))
    else:
        await running.stub.Release(pb.ReleaseRequest(releases=releases))
    assert (await running.load()).num_sequences == 0
    assert pools.pool_ids() == ["good"]
    [entry] = [entry for entry in running.log if entry["log_level"] == "error"]
    assert (entry["event"], entry["sequence_id"]) == ("release_failed", "bad")
    assert running.sample("tandem_drafter_internal_errors_total", reason="release") == 1
