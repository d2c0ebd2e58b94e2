"""A flood of streams that are opened and reset at once, beside a client that behaves."""

import asyncio

import pytest

from tandem.v1 import gateway_pb2 as pb
from tests.drills.http2_flood import Flood
from tests.gateway.running_gateway import StartGateway, collect, read
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

METHOD = "/tandem.v1.GenerationService/Generate"
OUTPUT = [5 + i % 7 for i in range(200)] + [STOP]


# With some streams open at a time, many requests reach the verifier before they are reset.
@pytest.mark.parametrize(
    ("num_streams", "sends_request", "num_open"),
    [(2000, False, 0), (2000, True, 0), (300, True, 64)],
)
async def test_a_flood_of_resets_ends_no_other_request_and_leaves_nothing(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    num_streams: int,
    sends_request: bool,
    num_open: int,
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    verifier.play(lambda opened: OUTPUT)
    request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]), request_id="flood")
    message = request.SerializeToString() if sends_request else None
    async with Flood(running.gateway.server.address, METHOD) as flood:
        bystander = running.call(1, request_id="bystander")
        assert (await read(bystander)).started.request_id == "bystander"
        flooding = asyncio.ensure_future(
            flood.open_and_reset(num_streams, message=message, num_open=num_open)
        )
        output = await collect(bystander)
        assert output.token_ids == OUTPUT
        # Others during and after it; the flood has a connection of its own.
        assert (await running.generate(1)).token_ids == OUTPUT
        async with asyncio.timeout(60):
            assert await flooding == num_streams or flood.is_cut_off
        assert (await running.generate(1)).token_ids == OUTPUT
    labels = {"service": "tandem.v1.GenerationService", "method": "Generate"}
    assert running.sample("tandem_rpc_requests_total", code="CANCELLED", **labels) > 0
    await running.until_idle()
    if num_open:
        assert running.sample("tandem_request_success_total", finish_reason="cancelled") > 0
    assert verifier.num_live == 0
