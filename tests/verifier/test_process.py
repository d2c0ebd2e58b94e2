"""`python -m verifier` as a process of its own."""

import asyncio
import json
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.v1 import verifier_pb2 as pb
from tandem.v1 import verifier_pb2_grpc
from tests.module_process import START_PATIENCE_S, module_process, read_line
from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.running_verifier import ClientSession


async def test_serves_and_at_sigterm_finishes_running_sequences_and_exits_with_0() -> None:
    flags = ["--model", str(MODEL_FOLDER), "--listen", "127.0.0.1:0", "--metrics-listen", "",
             "--dtype", "float32", "--num-kv-blocks", "128"]  # fmt: skip
    async with module_process("verifier", *flags) as process:
        line = await read_line(process)
        prefix, _, address = line.rstrip("\n").partition("=")
        assert prefix == "ready grpc"
        assert address.startswith("127.0.0.1:")
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "tandem.v1.VerifierService"):
                checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert checked.status == health_pb2.HealthCheckResponse.SERVING
            session = ClientSession(verifier_pb2_grpc.VerifierServiceStub(channel).Session())
            welcome = await session.hello()
            assert welcome.model_id == "model"
            await session.open(
                pb.Open(
                    sequence_id="a",
                    token_ids=[1, 2, 3],
                    max_new_tokens=40,
                    ignore_eos=True,
                    draft_wait=pb.DRAFT_WAIT_ALWAYS,
                )
            )
            await session.wait_decided("a")

            watched = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
            process.send_signal(signal.SIGTERM)
            while (await watched.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
            assert process.returncode is None, "it did not wait for what runs"
            update = pb.Update(sequence_id="a", drafting=False)
            await session.send(pb.Command(update=update))
            assert len(await session.wait_finished("a")) == 40
            assert await session.read_to_end() == grpc.StatusCode.OK
        async with asyncio.timeout(20):
            assert await process.wait() == 0
        assert await read_line(process) == "", "nothing but the ready line on stdout"


async def test_a_drain_that_times_out_during_steps_exits_with_0() -> None:
    flags = ["--model", str(MODEL_FOLDER), "--listen", "127.0.0.1:0", "--metrics-listen", "",
             "--dtype", "float32", "--drain-timeout-s", "0", "--num-kv-blocks", "2048",
             "--max-num-batched-tokens", "4096"]  # fmt: skip
    async with module_process("verifier", *flags) as process:
        address = (await read_line(process)).rstrip("\n").partition("=")[2]
        async with grpc.aio.insecure_channel(address) as channel:
            session = ClientSession(verifier_pb2_grpc.VerifierServiceStub(channel).Session())
            await session.hello()
            opens = [
                pb.Open(sequence_id=str(i), token_ids=[1, 2, 3] * 600, ignore_eos=True)
                for i in range(16)
            ]
            await session.open(*opens)
            await session.wait_decided("1")
            process.send_signal(signal.SIGTERM)
            assert await session.read_to_end() == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_model_that_cannot_be_served_is_reported_in_one_line(tmp_path: Path) -> None:
    flags = ["--model", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-listen", ""]
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "model.safetensors").touch()
    async with module_process("verifier", *flags) as process:
        async with asyncio.timeout(START_PATIENCE_S):
            stdout, stderr = await process.communicate()
        assert stdout == b""
        *logged, line = stderr.decode().splitlines()
        assert [json.loads(each)["event"] for each in logged] == ["served_by_transformers"]
        assert line == "error: --model: t5: encoder-decoder models are not served"
        assert process.returncode == 2
