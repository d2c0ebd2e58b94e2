"""Clients that leave the answers on their streams unread."""

import asyncio

import grpc

from tandem.v1 import drafter_pb2 as pb
from tests.drafter.deltas import replay
from tests.drafter.running_drafter import ProposeCall, RunningDrafter, StartDrafter, exchange

NUM_UNREAD = 100


async def ask_without_reading(running: RunningDrafter, stream: ProposeCall) -> None:
    """Asks for 20 MB of answers in a few hundred bytes, so that only reading can be the limit."""
    first = 2**32 - 40_000
    token_ids = [*range(first, first + 40_000), *range(first, first + 5)]
    for delta in replay("unread", token_ids):
        await exchange(stream, pb.ProposeRequest(sequences=[delta]))
    await running.indexed()
    again = pb.SequenceDelta(
        sequence_id="unread", base_length=len(token_ids), max_draft_tokens=40_000
    )
    for _ in range(NUM_UNREAD):
        await stream.write(pb.ProposeRequest(sequences=[again]))


async def test_a_client_that_stops_reading_is_disconnected(start_drafter: StartDrafter) -> None:
    running = await start_drafter(unread_timeout_s=0.3)
    stream = running.open_stream()
    await ask_without_reading(running, stream)
    await asyncio.wait_for(running.drafter.servicer.streams.all_closed.wait(), 30)
    # Nothing is read yet; the stream's sequences are forgotten as at the end of any stream.
    assert running.drafter.store.num_sequences == 1
    running.clock.now_s += 31
    assert (await running.load()).num_sequences == 0

    num_read = 0
    error = None
    while error is None:
        try:
            response = await stream.read()
        except grpc.aio.AioRpcError as ended_with:
            error = ended_with
        else:
            assert isinstance(response, pb.ProposeResponse)
            assert len(response.proposals[0].token_ids) == 40_000
            num_read += 1
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "answers were left unread for 0.3 s"
    assert 0 < num_read < NUM_UNREAD, "only as much was answered as the transport buffers"
