"""`python -m drafter` as a process of its own."""

import asyncio
import signal
import urllib.request
from pathlib import Path

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


async def test_exports_its_metrics_and_stops_on_sigint() -> None:
    # Port 0 does not say which port it became, so this one is picked here.
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with module_process(
        "drafter",
        TANDEM_DRAFTER_LISTEN="127.0.0.1:0",
        TANDEM_DRAFTER_METRICS_LISTEN=f"127.0.0.1:{port}",
    ) as process:
        assert (await read_line(process)).startswith("ready grpc=127.0.0.1:")
        url = f"http://127.0.0.1:{port}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=10) as response:
                return str(response.read().decode())

        scraped = await asyncio.to_thread(scrape)
        for name in (
            "tandem_drafter_sequences 0.0",
            "tandem_drafter_history_bytes 0.0",
            'tandem_drafter_proposals_total{outcome="draft",source="sequence"} 0.0',
            'tandem_drafter_evictions_total{reason="idle"} 0.0',
            "tandem_drafter_proposal_seconds_count 0.0",
        ):
            assert name in scraped
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_a_wrong_flag_is_named_and_nothing_starts() -> None:
    async with module_process("drafter", "--pool-ttl-s", "soon") as process:
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert out == b""
        assert b"--pool-ttl-s" in err


async def test_a_snapshot_folder_that_cannot_be_one_is_named_and_nothing_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    flags = ("--listen", "127.0.0.1:0", "--metrics-listen", "")
    async with module_process(
        "drafter", *flags, "--snapshot-dir", str(tmp_path / "file")
    ) as process:
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert out == b""
        assert err.decode() == (
            f"error: --snapshot-dir: {tmp_path / 'file'}: cannot be written to: Not a directory\n"
        )
