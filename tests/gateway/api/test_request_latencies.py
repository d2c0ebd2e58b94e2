"""Each latency of a choice is observed once, and is the time between its two events."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.api.request_record import RequestRecord
from gateway.model_metrics import MetricsByModel
from servicekit.logs import get_logger
from tandem.values import FinishReason
from tests.gateway.factories import append_step, make_generation
from tests.gateway.running_gateway import StartGateway, collect, sum_of_samples
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

LATENCIES = {
    "time_to_first_token_seconds": "first token",
    "request_queue_time_seconds": "first token",
    "request_prefill_time_seconds": "first token",
    "request_time_per_output_token_seconds": "second token",
    "e2e_request_latency_seconds": "end",
}
LENGTHS = ("request_prompt_tokens", "request_generation_tokens")


class Observed:
    """What one registry's histograms have observed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def of(self, name: str) -> tuple[float, float]:
        """(count, sum)."""
        count, total = (
            sum_of_samples(self._registry, f"tandem_{name}_{suffix}", {})
            for suffix in ("count", "sum")
        )
        return count, total


class Clock:
    """Seconds that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("num_given", [0, 2])
def test_latencies_by_a_scripted_clock(num_given: int) -> None:
    registry, clock = CollectorRegistry(), Clock()
    observed, metrics = Observed(registry), MetricsByModel(registry).of("model")
    record = RequestRecord(tenant="", spans=None, logger=get_logger("test"), clock=clock)
    generation = make_generation([9] * 5, output_token_ids=[7] * num_given)
    clock.now_s = 100.5
    record.opened(generation.request, [generation])
    generation.admitted_at_s = 102.5
    clock.now_s = 106.5
    append_step(generation, [1])
    generation.publish()
    assert record.sent(generation, metrics)
    assert observed.of("time_to_first_token_seconds") == (1, 6.5)
    assert observed.of("request_queue_time_seconds") == (1, 2)
    assert observed.of("request_prefill_time_seconds") == (1, 4)
    # Two more tokens in one message, then two at the end.
    for clock.now_s, finish in ((107.5, None), (108.5, FinishReason.LENGTH)):
        append_step(generation, [2, 3], finish=finish)
        generation.publish()
        assert not record.sent(generation, metrics)
    record.finished(generation, metrics)
    assert observed.of("inter_token_latency_seconds") == (2, 2)
    assert observed.of("e2e_request_latency_seconds") == (1, 8.5)
    # (8.5 - 6.5) / (5 - 1): tokens that the client brought took no time here.
    assert observed.of("request_time_per_output_token_seconds") == (1, 0.5)
    assert observed.of("request_prompt_tokens") == (1, 5)
    assert observed.of("request_generation_tokens") == (1, 5)
    # Those of the first token were not observed again.
    assert {observed.of(name)[0] for name in LATENCIES} == {1}


@pytest.mark.stand_in
async def test_a_choice_that_its_client_leaves_has_no_end(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, 2)
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.opened(opened.sequence_id))
    verifier.send(verifier.decided(opened.sequence_id, 2, [5]))
    await until_chunk(call)
    call.cancel()
    await verifier.nth("close", 0)
    observed = Observed(running.registry)
    counts = {name: observed.of(name)[0] for name in (*LATENCIES, *LENGTHS)}
    assert counts == {name: LATENCIES.get(name) == "first token" for name in (*LATENCIES, *LENGTHS)}


@pytest.mark.stand_in
async def test_the_share_of_blocks_is_that_of_the_verifiers_last_step(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.limits["num_kv_blocks"] = 200
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, 2)
    opened = await verifier.nth("open", 0)
    verifier.tell_step(num_kv_blocks_used=50)
    verifier.send(verifier.decided(opened.sequence_id, 2, [5]))
    await until_chunk(call)
    assert running.sample("tandem_kv_cache_usage_perc") == 0.25
    verifier.send(verifier.decided(opened.sequence_id, 3, [6], finish=STOP))
    await collect(call)
    # What it uses now is not known.
    assert running.sample("tandem_kv_cache_usage_perc") == 0


async def until_chunk(call: Any) -> None:
    """Reads a call to its first output."""
    while not (await call.read()).HasField("chunk"):
        pass
