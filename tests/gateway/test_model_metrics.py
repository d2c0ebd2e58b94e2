"""Requests are counted by the models that verifiers report, and by nothing that clients choose."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.messages.response import Step
from gateway.model_metrics import MetricsByModel
from servicekit.telemetry.metrics import Exposition, choose_format
from tandem.values import FinishReason
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import RunningGateway, StartGateway, collect, read, until
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def models(registry: CollectorRegistry, name: str) -> set[str]:
    return {
        sample.labels["model"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def text_of(registry: CollectorRegistry, accept: str = "") -> str:
    """What a scraper with this header gets."""
    encode, _ = choose_format(accept)
    return encode(Exposition(registry)).decode()


def test_all_series_of_a_model_begin_at_zero() -> None:
    registry = CollectorRegistry()
    MetricsByModel(registry).of("a")
    families = list(text_string_to_metric_families(text_of(registry)))
    by_name = {family.name: family.samples for family in families if "created" not in family.name}
    # Positions come with the verifiers' limits.
    assert not by_name.pop("tandem_spec_decode_num_accepted_tokens_per_pos")
    for name, samples in by_name.items():
        assert samples, name
        assert {sample.value for sample in samples} == {0}, name


def test_the_number_of_models_is_bounded() -> None:
    registry = CollectorRegistry()
    metrics = MetricsByModel(registry)
    step = Step(num_tokens=1, num_draft_tokens=1, num_accepted_tokens=0)
    for index in range(100):
        metrics.of(f"model-{index}").count_steps([step])
        metrics.of(f"model-{index}").count_end(FinishReason.STOP)
    for name in ("generation_steps_total", "spec_decode_match_length_count"):
        known = models(registry, f"tandem_{name}")
        assert len(known) == 33
        assert registry.get_sample_value(f"tandem_{name}", {"model": "other"}) == 68


def test_exemplars_are_shown_to_those_who_read_openmetrics() -> None:
    registry = CollectorRegistry()
    metrics = MetricsByModel(registry).of("a")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    for observe in (
        metrics.observe_first_token,
        metrics.observe_next_token,
        metrics.observe_last_token,
    ):
        observe(0.5, {"trace_id": trace_id})
        observe(0.5, None)
    assert text_of(registry, OPENMETRICS).count(f'# {{trace_id="{trace_id}"}}') == 3
    assert trace_id not in text_of(registry, "text/plain")


@pytest.mark.stand_in
async def test_each_model_has_its_own_series(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    addresses = []
    for model_id in ("a", "b"):
        verifier = await start_verifier()
        verifier.model_id = verifier.model_digest = model_id
        verifier.play(lambda opened: [5, 6, 0])
        addresses.append(verifier.address)
    running = await start_gateway(verifiers=addresses)
    await until(lambda: models(running.registry, "tandem_prompt_tokens_total") == {"a", "b"})
    await running.generate(1, 2, model_id="b")
    for model_id, num_tokens in (("a", 0), ("b", 3)):
        assert running.sample("tandem_generation_tokens_total", model=model_id) == num_tokens
        name = "tandem_time_to_first_token_seconds_count"
        assert running.sample(name, model=model_id) == num_tokens / 3


@pytest.mark.stand_in
async def test_latencies_are_finer_than_the_clock_of_the_event_loop(
    start_gateway: StartGateway, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    # uvloop's counts whole milliseconds; in tenths of seconds it is surely too coarse.
    monkeypatch.setattr(
        asyncio.get_running_loop(), "time", lambda: time.monotonic_ns() // 10**8 / 10
    )
    ongoing = running.call(1, 2)
    await read(ongoing)
    sequence_id = (await verifier.nth("open", 0)).sequence_id
    verifier.send(verifier.decided(sequence_id, 2, [5]))
    await read(ongoing)
    verifier.send(verifier.decided(sequence_id, 3, [0], finish=STOP))
    await collect(ongoing)
    await until(lambda: any(entry["event"] == "request_ended" for entry in running.log))
    line: Any
    (line,) = (entry for entry in running.log if entry["event"] == "request_ended")
    first_s, next_s, last_s = (
        running.sample(f"tandem_{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    )
    rounding_s = 1e-6
    assert 0 < first_s <= line["first_token_s"] + rounding_s
    assert 0 < next_s <= last_s <= line["total_s"] + rounding_s


@pytest.mark.stand_in
async def test_nothing_that_a_client_chooses_makes_a_series(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 6, 0])
    running = await start_gateway(verifiers=[verifier.address])
    await call_with(running, "first")
    series = all_series(running)
    for index in range(10):
        await call_with(running, f"chosen{index}")
    assert all_series(running) == series
    assert "chosen" not in str(series)


async def call_with(running: RunningGateway, name: str) -> None:
    """A request with a name in all its fields, and one for a model of that name."""
    await running.generate(1, 2, request_id=name, affinity_key=name, speculation={"pool": name})
    with pytest.raises(grpc.aio.AioRpcError):
        await running.generate(1, 2, model_id=name)
    method: Any = running.channel.unary_unary(f"/tandem.v1.GenerationService/{name}")
    with pytest.raises(grpc.aio.AioRpcError):
        await method(b"")


def all_series(running: RunningGateway) -> set[tuple[str, str]]:
    return {
        (sample.name, str(sample.labels))
        for family in running.registry.collect()
        for sample in family.samples
    }
