"""`python -m gateway` as operators see it."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.gateway.openai.clients import request_bytes
from tests.gateway.running_gateway import read
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier
from tests.module_process import module_process

pytestmark = pytest.mark.stand_in

NO_METRICS = {"TANDEM_GATEWAY_METRICS_LISTEN": ""}


@contextlib.asynccontextmanager
async def short_drain(
    verifier: ScriptedVerifier, model_folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    """A gateway that waits for its requests for 0.1 s; with the address of gRPC, and of HTTP."""
    arguments = (
        *("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--drain-timeout-s", "0.1"),
        *("--verifiers", verifier.address, "--tokenizer", str(model_folder)),
    )
    async with module_process("gateway", *arguments, **NO_METRICS) as gateway, asyncio.timeout(60):
        assert gateway.stdout is not None
        words = (await gateway.stdout.readline()).decode().split()
        target, http = (word.partition("=")[2] for word in words[1:])
        yield gateway, target, http.split(":")


async def test_it_is_ready_with_its_first_verifier_and_drains_on_sigterm(
    verifier: ScriptedVerifier,
) -> None:
    address = verifier.address
    await verifier.stop()
    arguments = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--verifiers", address)
    async with module_process("gateway", *arguments, **NO_METRICS) as gateway, asyncio.timeout(60):
        assert gateway.stdout is not None
        line = asyncio.ensure_future(gateway.stdout.readline())
        await asyncio.wait({line}, timeout=0.5)
        assert not line.done(), "no verifier, no ready line"
        await verifier.start(address)
        words = (await line).decode().split()
        assert words[0] == "ready"
        fields = dict(word.split("=") for word in words[1:])
        assert set(fields) == {"grpc", "http"}
        async with grpc.aio.insecure_channel(fields["grpc"]) as channel:
            stub = gateway_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(
                gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenIds(token_ids=[1]))
            )
            await read(call)
            opened = await verifier.nth("open", 0)
            gateway.send_signal(signal.SIGTERM)
            verifier.send(verifier.decided(opened.sequence_id, 1, [5], finish=STOP))
            assert list((await read(call)).chunk.token_ids) == [5]
            assert (await read(call)).finished.finish_reason == STOP
        assert await gateway.wait() == 0


async def test_streams_that_outlive_the_drain_end_with_the_reason(
    verifier: ScriptedVerifier, model_folder: Path
) -> None:
    async with short_drain(verifier, model_folder) as (gateway, target, (host, port)):
        async with (
            contextlib.AsyncExitStack() as clients,
            grpc.aio.insecure_channel(target) as channel,
        ):
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
                gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenIds(token_ids=[1]))
            )
            await read(call)
            reader, writer = await asyncio.open_connection(host, int(port))
            clients.callback(writer.close)
            body = {"model": "scripted", "prompt": [1], "stream": True}
            writer.write(request_bytes("/v1/completions", body, connection="close"))
            for index in (0, 1):
                opened = await verifier.nth("open", index)
                verifier.send(verifier.decided(opened.sequence_id, 1, [300]))
            assert list((await read(call)).chunk.token_ids) == [300]
            await reader.readuntil(b"data: ")
            gateway.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the server is shutting down"
            events = (await reader.read()).decode()
        assert '"message": "the server is shutting down"' in events
        assert events.endswith("0\r\n\r\n"), "the answer is whole"
        assert await gateway.wait() == 0


async def test_an_invalid_configuration_is_one_line_and_exit_code_2() -> None:
    arguments = ("--verifiers", "127.0.0.1:1", "--tokenizer", "/nowhere")
    async with module_process("gateway", *arguments, **NO_METRICS) as gateway, asyncio.timeout(60):
        stdout, stderr = await gateway.communicate()
    assert gateway.returncode == 2
    assert stdout == b""
    (line,) = stderr.decode().splitlines()
    assert "--tokenizer: /nowhere/tokenizer.json: no such file" in line
