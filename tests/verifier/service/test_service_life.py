"""The service's start, its drain, its calls outside of sessions, and its metrics."""

import asyncio
import threading
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from servicekit.errors import code_number, retry_after_ms
from servicekit.logs import get_logger
from tandem.v1 import verifier_pb2 as pb
from tandem.v1 import verifier_pb2_grpc
from tests.verifier.opens import PROMPT, VOCAB_SIZE, make_open
from tests.verifier.running_verifier import (
    PATIENCE_S,
    ClientSession,
    RunningVerifier,
    StartVerifier,
)
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.server import VerifierServer


class TestDrain:
    async def test_refuses_opens_and_finishes_what_runs(
        self, start_verifier: StartVerifier, greedy_output: list[int]
    ) -> None:
        running = await start_verifier()
        session, idle = await running.greeted_session(), await running.greeted_session()
        await session.open(make_open(draft_wait=pb.DRAFT_WAIT_ALWAYS))
        await session.wait_decided("a")
        draining = asyncio.create_task(running.verifier.servicer.drain())
        await asyncio.sleep(0)  # it has begun
        newcomer = await running.greeted_session()
        for refused in (session, idle, newcomer):
            await refused.open(make_open("late"))
            rejected = await refused.wait_rejected()
            assert rejected.sequence_id == "late"
            assert rejected.code == code_number(grpc.StatusCode.UNAVAILABLE)
            assert rejected.retry_after_ms > 0
            told = [event for event in refused.events if event.HasField("draining")]
            assert len(told) == 1
        assert not draining.done()
        await session.send(pb.Command(update=pb.Update(sequence_id="a", drafting=False)))
        assert await session.wait_finished("a") == greedy_output
        async with asyncio.timeout(PATIENCE_S):
            await draining
        for ended in (session, idle, newcomer):
            assert await ended.read_to_end() == grpc.StatusCode.OK

    async def test_with_nothing_open_ends_at_once(self, start_verifier: StartVerifier) -> None:
        running = await start_verifier()
        session = await running.greeted_session()
        async with asyncio.timeout(PATIENCE_S):
            await running.verifier.servicer.drain()
        assert await session.read_to_end() == grpc.StatusCode.OK


class TestUnaryCalls:
    async def test_get_model_info(
        self, start_verifier: StartVerifier, bundled_model: LoadedModel
    ) -> None:
        running = await start_verifier()
        response = await running.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert response.model_id == "renamer"
        assert response.model_digest == bundled_model.served.model_digest
        assert response.architecture == "Qwen3ForCausalLM"
        assert response.dtype == "float32"
        assert response.device == "cpu"
        assert response.numerics == "strict"
        assert response.attention_backend == "own"
        assert list(response.eos_token_ids) == [0]
        assert response.limits.vocab_size == VOCAB_SIZE

    async def test_get_verifier_load(
        self, start_verifier: StartVerifier, bundled_model: LoadedModel
    ) -> None:
        running = await start_verifier(max_num_seqs=1)
        session = await running.greeted_session()
        await session.open(*(make_open(str(i), draft_wait=pb.DRAFT_WAIT_ALWAYS) for i in range(2)))
        await session.wait_decided("0")
        await session.draft("0", len(PROMPT) + 1, [])
        await session.wait_decided("0", 2)
        await running.sync()
        load = await running.load()
        assert load.instance_id == bundled_model.served.instance_id
        assert (load.num_running, load.num_waiting) == (1, 1)
        assert (load.num_kv_blocks_used, load.num_kv_blocks_total) == (3, 512)
        assert load.num_steps == 2
        assert load.step_duration_s > 0
        assert load.hop_duration_s > 0
        running.engine._estimates._recent_hops_s.extend([1.0] * 98 + [2.0] * 2)
        load = await running.load()
        assert (load.hop_p50_s, load.hop_p99_s) == (1.0, 2.0)


class TestMetrics:
    async def test_count_steps_hints_and_blocks(
        self, start_verifier: StartVerifier, greedy_output: list[int]
    ) -> None:
        running = await start_verifier()
        session = await running.greeted_session()
        await session.open(make_open(draft_wait=pb.DRAFT_WAIT_ALWAYS))
        await session.wait_decided("a")
        await session.draft("a", len(PROMPT) + 1, greedy_output[1:4])
        await session.wait_decided("a", 2)
        await session.draft("a", len(PROMPT) + 1, [1])
        await session.draft("a", len(PROMPT) + 5, [])
        await session.wait_decided("a", 3)
        await running.sync()
        assert sample(running, "tandem_kv_blocks_total") == 512
        assert sample(running, "tandem_kv_blocks_used") == 3
        assert sample(running, "tandem_verifier_sequences_running") == 1
        assert sample(running, "tandem_verifier_max_num_seqs") == 8
        assert sample(running, "tandem_draft_hints_total", outcome="used") == 1
        assert sample(running, "tandem_draft_hints_total", outcome="stale") == 1
        assert sample(running, "tandem_draft_hop_seconds_count") == 2
        assert sample(running, "tandem_step_tokens_sum") == len(PROMPT) + 4 + 1
        for phase in ("schedule", "forward", "verify", "commit"):
            assert sample(running, "tandem_step_duration_seconds_count", phase=phase) == 3
        # Each step by its drafts: the prompt's 0, then 3, then 0; 4 + 1 tokens in 2 decode steps.
        assert sample(running, "tandem_speculation_depth_bucket", le="0.0") == 2
        assert sample(running, "tandem_speculation_depth_bucket", le="3.0") == 3
        assert sample(running, "tandem_speculation_depth_count") == 3
        assert sample(running, "tandem_speculation_depth_sum") == 3
        assert sample(running, "tandem_step_cost_error_ratio_count") == 3
        assert sample(running, "tandem_decode_seconds_total") > 0
        assert sample(running, "tandem_decode_plain_seconds_total") > 0
        assert sample(running, "tandem_verifier_pending_commands") == 0


def sample(running: RunningVerifier, name: str, **labels: str) -> float:
    values = [
        sample.value
        for family in running.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert values, f"{name}{labels} is not measured"
    return sum(values)


async def test_while_the_model_loads_health_is_not_serving_and_calls_are_refused(
    bundled_config: VerifierConfig, bundled_model: LoadedModel
) -> None:
    loads, goes_on = threading.Event(), threading.Event()

    def load(_: VerifierConfig) -> LoadedModel:
        loads.set()
        goes_on.wait(PATIENCE_S)
        return bundled_model

    verifier = VerifierServer(
        bundled_config, registry=CollectorRegistry(), logger=get_logger("test")
    )
    starting = asyncio.create_task(verifier.start(load))
    try:
        assert await asyncio.to_thread(loads.wait, PATIENCE_S)
        async with grpc.aio.insecure_channel(verifier.server.address) as channel:
            await assert_refused_while_loading(channel)
            goes_on.set()
            engine = await starting
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetModelInfo(
                pb.GetModelInfoRequest()
            )
        engine.stop()
        await asyncio.wrap_future(engine.stopped)
    finally:
        goes_on.set()
        await asyncio.wait([starting])
        await verifier.server.stop(0)


async def assert_refused_while_loading(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "tandem.v1.VerifierService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    session = ClientSession(stub.Session())
    calls: list[Callable[[], object]] = [
        lambda: stub.GetModelInfo(pb.GetModelInfoRequest()),
        lambda: stub.GetVerifierLoad(pb.GetVerifierLoadRequest()),
        session.call.read,
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call()  # type: ignore[misc]
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error.value)


async def test_a_model_that_cannot_be_loaded_leaves_no_server_running(
    bundled_config: VerifierConfig,
) -> None:
    def fail(_: VerifierConfig) -> LoadedModel:
        raise RuntimeError("no such weights")

    verifier = VerifierServer(
        bundled_config, registry=CollectorRegistry(), logger=get_logger("test")
    )
    with pytest.raises(RuntimeError, match="no such weights"):
        await verifier.start(fail)
    host, _, port = verifier.server.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
