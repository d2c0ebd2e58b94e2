"""Requests are counted by the models that verifiers report, and by nothing that clients choose."""

from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.generation.generation import Generation
from gateway.messages.response import Step
from gateway.model_metrics import MetricsByModel
from tandem.values import FinishReason
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import RunningGateway, StartGateway, collect, until
from tests.gateway.scripted_verifier import ScriptedVerifier


def models(registry: CollectorRegistry, name: str) -> set[str]:
    return {
        sample.labels["model"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_the_number_of_models_is_bounded() -> None:
    registry = CollectorRegistry()
    metrics = MetricsByModel(registry)
    step = Step(num_tokens=1, num_draft_tokens=1, num_accepted_tokens=0)
    for index in range(100):
        metrics.of(f"model-{index}").count_steps([step])
        metrics.of(f"model-{index}").count_end(FinishReason.STOP)
    assert len(models(registry, "tandem_generation_steps_total")) == 33
    assert registry.get_sample_value("tandem_generation_steps_total", {"model": "other"}) == 68


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


@pytest.mark.stand_in
async def test_tokens_of_several_models_that_are_shown_together_are_counted_apart(
    start_gateway: StartGateway, start_verifier: StartVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifiers = [await start_verifier() for _ in range(2)]
    for verifier, model_id in zip(verifiers, ("one", "two"), strict=True):
        verifier.model_id = model_id
        verifier.play(lambda opened: [5, 6, 7, 0])
    running = await start_gateway(verifiers=[each.address for each in verifiers])
    await until(lambda: len(running.gateway.fleet.models()) == 2)
    coordinator = running.gateway.coordinator
    waiting: list[Generation] = []
    monkeypatch.setattr(coordinator._delivery, "_publish", waiting.extend)
    calls = [running.call(1, 2, model_id="one", n=3), running.call(1, 2, model_id="two")]
    await until(lambda: len({each for each in waiting if each._decided_finish_reason}) == 4)
    coordinator._publish(waiting)
    for call in calls:
        await collect(call)
    for model_id, num_choices in (("one", 3), ("two", 1)):
        num_tokens = running.sample("tandem_generation_tokens_total", model=model_id)
        assert num_tokens == 4 * num_choices


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
