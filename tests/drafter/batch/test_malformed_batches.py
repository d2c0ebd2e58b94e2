"""Malformed batches are refused as a whole, and the server goes on."""

import grpc
import pytest

from servicekit.errors import field_violation
from tandem.v1 import drafter_pb2 as pb
from tests.drafter.running_drafter import RunningDrafter, StartDrafter, exchange

GOOD = pb.SequenceDelta(sequence_id="good", token_ids=[1, 2])

MALFORMED = [
    (
        "sequences",
        pb.ProposeRequest(sequences=[pb.SequenceDelta(sequence_id=f"{i}") for i in range(4097)]),
    ),
    (
        "sequences",
        pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(sequence_id=f"{i}", token_ids=[2**32 - 1] * 8192)
                for i in range(26)
            ]
        ),
    ),
    ("sequences[1].sequence_id", pb.ProposeRequest(sequences=[GOOD, GOOD])),
    ("sequences[1].sequence_id", pb.ProposeRequest(sequences=[GOOD, pb.SequenceDelta()])),
    (
        "sequences[1].sequence_id",
        pb.ProposeRequest(sequences=[GOOD, pb.SequenceDelta(sequence_id="x" * 65)]),
    ),
    ("releases[0].sequence_id", pb.ProposeRequest(sequences=[GOOD], releases=[pb.Release()])),
    (
        "releases",
        pb.ProposeRequest(sequences=[GOOD], releases=[pb.Release(sequence_id="x")] * 4097),
    ),
]
ids = [f"{i}-{field}" for i, (field, _) in enumerate(MALFORMED)]

# Refused as a whole in a call; on a stream, for the one sequence alone.
OVER_A_LIMIT = {
    "token_ids": pb.SequenceDelta(sequence_id="x", token_ids=[1] * 8193),
    "params.pool_id": pb.SequenceDelta(sequence_id="x", params=pb.NgramParams(pool_id="x" * 257)),
}


def assert_names_field(error: grpc.aio.AioRpcError, field: str) -> None:
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    violation = field_violation(error)
    assert violation is not None
    assert violation[0] == field


async def assert_serves_and_knows_nothing(running: RunningDrafter) -> None:
    assert (await running.load()).num_sequences == 0, "something of the batch was applied"
    [proposal] = await running.propose(GOOD)
    assert proposal.base_length == 2


@pytest.mark.parametrize(("field", "request_"), MALFORMED, ids=ids)
async def test_a_call_is_refused_naming_the_field(
    start_drafter: StartDrafter, field: str, request_: pb.ProposeRequest
) -> None:
    running = await start_drafter()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.stub.Propose(request_)
    assert_names_field(error.value, field)
    await assert_serves_and_knows_nothing(running)


# A release is not answered on a stream: a malformed one fails alone (test_release.py).
ENDING = [
    pytest.param(field, request, id=name)
    for name, (field, request) in zip(ids, MALFORMED, strict=True)
    if not field.startswith("releases[")
]


@pytest.mark.parametrize(("field", "request_"), ENDING)
async def test_a_stream_ends_naming_the_field(
    start_drafter: StartDrafter, field: str, request_: pb.ProposeRequest
) -> None:
    running = await start_drafter()
    stream, bystander = running.open_stream(), running.open_stream()
    await exchange(bystander, pb.ProposeRequest())
    await stream.write(request_)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    assert_names_field(error.value, field)
    await exchange(bystander, pb.ProposeRequest())
    await assert_serves_and_knows_nothing(running)


@pytest.mark.parametrize("field", OVER_A_LIMIT)
async def test_a_delta_over_a_limit_is_refused_alone_on_a_stream_and_with_its_call(
    start_drafter: StartDrafter, field: str
) -> None:
    running = await start_drafter()
    request = pb.ProposeRequest(sequences=[GOOD, OVER_A_LIMIT[field]])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.stub.Propose(request)
    assert_names_field(error.value, f"sequences[1].{field}")
    assert (await running.load()).num_sequences == 0
    good, bad = (await exchange(running.open_stream(), request)).proposals
    assert (good.status, good.base_length) == (pb.STATUS_OK, 2)
    assert (bad.status, bad.message.partition(":")[0]) == (pb.STATUS_INVALID, field)
    assert (await running.load()).num_sequences == 1


async def test_a_malformed_release_is_refused_whole(start_drafter: StartDrafter) -> None:
    running = await start_drafter()
    await running.propose(GOOD)
    for bad in (pb.Release(), pb.Release(sequence_id="x" * 65)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Release(
                pb.ReleaseRequest(releases=[pb.Release(sequence_id="good"), bad])
            )
        assert_names_field(error.value, "releases[1].sequence_id")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await running.stub.Release(
            pb.ReleaseRequest(releases=[pb.Release(sequence_id="good")] * 4097)
        )
    assert_names_field(error.value, "releases")
    assert (await running.load()).num_sequences == 1
