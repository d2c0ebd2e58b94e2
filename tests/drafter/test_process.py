"""`python -m drafter` as a process of its own."""

import asyncio
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc
from tests.drafter.running_drafter import exchange
from tests.module_process import module_process, read_line


async def test_serves_until_sigterm_and_ends_its_streams() -> None:
    flags = ("--listen", "127.0.0.1:0", "--metrics-listen", "")
    async with module_process("drafter", *flags) as process:
        line = await read_line(process)
        prefix, _, address = line.rstrip("\n").partition("=")
        assert prefix == "ready grpc"
        assert address.startswith("127.0.0.1:")
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "tandem.v1.DrafterService"):
                checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert checked.status == health_pb2.HealthCheckResponse.SERVING
            stream = drafter_pb2_grpc.DrafterServiceStub(channel).ProposeStream()
            request = pb.ProposeRequest(
                sequences=[
                    pb.SequenceDelta(sequence_id="a", token_ids=[1, 2, 3, 1, 2], max_draft_tokens=2)
                ]
            )
            assert list((await exchange(stream, request)).proposals[0].token_ids) == [3, 1]

            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream.read()
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in (error.value.details() or "")
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert await read_line(process) == "", "nothing but the ready line on stdout"
