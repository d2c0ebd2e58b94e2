"""The calls of clients that stop reading end after a time and free what they hold."""

import asyncio

import grpc
import pytest

from servicekit.errors import retry_after_ms
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import GenerateCall, StartGateway, collect, read
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

# More than the window below, sockets and the transport's own buffer.
UNREAD_TOKENS = 500_000

# A client whose transport takes little beyond what is read.
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0))


async def leave_unread(
    channel: grpc.aio.Channel, verifier: ScriptedVerifier, *, finish: int
) -> GenerateCall:
    """A call whose client reads its first message only, and has much output."""
    call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
        gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenIds(token_ids=[1]))
    )
    await read(call)
    opened = await verifier.nth("open", 0)
    output = [1999] * UNREAD_TOKENS
    verifier.send(verifier.decided(opened.sequence_id, 1, output, finish=finish))
    return call


@pytest.mark.parametrize("finish", [0, STOP], ids=["running", "ended"])
async def test_the_call_of_a_client_that_does_not_read_ends(
    start_gateway: StartGateway, start_verifier: StartVerifier, finish: int
) -> None:
    verifier = await start_verifier(max_model_len=1 << 21)
    running = await start_gateway(
        verifiers=[verifier.address], unread_timeout_s=0.4, max_concurrent_requests=1
    )
    async with grpc.aio.insecure_channel(
        running.gateway.server.address, options=SMALL_WINDOW
    ) as channel:
        call = await leave_unread(channel, verifier, finish=finish)
        # Everything that it held is freed, although the client is still connected.
        await running.until_idle()
        if not finish:
            await verifier.nth("close", 0)
        assert running.sample("tandem_requests_unread_total") == 1
        assert running.sample("tandem_request_errors_total", code="RESOURCE_EXHAUSTED") == 1
        [line] = [entry for entry in running.log if entry["event"] == "request_ended"]
        assert line["status"] == "RESOURCE_EXHAUSTED"
        verifier.play(lambda opened: [5, 0])
        assert (await running.generate(1)).token_ids == [5, 0]
        await asyncio.wait_for(running.gateway.drain(), 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "output was left unread for 0.4 s"
        assert retry_after_ms(caught.value) is None
