"""One request through three traced processes is one trace; a collector can harm nobody."""

import json
import secrets
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.integration.otlp_collector import (
    CollectedSpan,
    Collector,
    running_collector,
)
from tests.integration.processes import Service, gateway, verifier_with_drafter

# The bundled model renames the identifier.
PROMPT = "<|code|>total = price + tax\nprint(total)\nreturn total<|rename|>total<|to|>bill<|out|>"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Every part of a request's trace: its service, its name, and those of its parent.
TREE = {
    ("tandem-gateway", "generate"): ("client", ""),
    ("tandem-gateway", "prepare"): ("tandem-gateway", "generate"),
    ("tandem-gateway", "queue"): ("tandem-gateway", "generate"),
    ("tandem-gateway", "first_token"): ("tandem-gateway", "generate"),
    ("tandem-verifier", "sequence"): ("tandem-gateway", "generate"),
    ("tandem-verifier", "queue"): ("tandem-verifier", "sequence"),
    ("tandem-verifier", "prefill"): ("tandem-verifier", "sequence"),
    ("tandem-verifier", "decode"): ("tandem-verifier", "sequence"),
    ("tandem-drafter", "history"): ("tandem-verifier", "sequence"),
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def engines(collector: Collector) -> Iterator[tuple[Service, Service]]:
    """A verifier and a drafter that are traced."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv(ENDPOINT, f"http://{collector.address}")
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with verifier_with_drafter() as services:
            yield services


@pytest.fixture(scope="module")
def traced(collector: Collector, engines: tuple[Service, Service]) -> Iterator[Service]:
    """A gateway that is traced, too."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv(ENDPOINT, f"http://{collector.address}")
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with gateway(*engines) as running:
            yield running


def new_trace_parent(*, is_sampled: bool = True) -> tuple[str, str, str]:
    """A client's span: as header, its trace's id, its own."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{int(is_sampled):02x}", trace_id, span_id


def complete_over_http(target: Service, trace_parent: str) -> Any:
    """The usage of one completion."""
    answer = post(target, "completions", trace_parent, prompt=PROMPT, max_tokens=64, temperature=0)
    return answer["usage"]


def post(target: Service, path: str, trace_parent: str, **fields: Any) -> Any:
    request = urllib.request.Request(
        f"http://{target.addresses['http']}/v1/{path}",
        json.dumps({"model": models(target)[0], **fields}).encode(),
        {"content-type": "application/json", "traceparent": trace_parent},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def models(target: Service) -> list[str]:
    url = f"http://{target.addresses['http']}/v1/models"
    with urllib.request.urlopen(url, timeout=120) as response:
        return [model["id"] for model in json.load(response)["data"]]


def generate_over_grpc(target: Service, trace_parent: str, **fields: Any) -> gateway_pb2.Usage:
    with grpc.insecure_channel(target.address) as channel:
        call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
            gateway_pb2.GenerateRequest(text=PROMPT, max_new_tokens=64, **fields),
            metadata=(("traceparent", trace_parent),),
            timeout=120,
        )
        (usage,) = [each.finished.usage for each in call if each.HasField("finished")]
        return usage


def names(spans: list[CollectedSpan], trace_id: str) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in spans if span.trace_id == trace_id}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_one_request_is_one_trace_through_all_services(
    collector: Collector, traced: Service, transport: str
) -> None:
    trace_parent, trace_id, client_id = new_trace_parent()
    if transport == "grpc":
        usage = generate_over_grpc(traced, trace_parent)
        num_output, num_prompt = usage.output_tokens, usage.prompt_tokens
    else:
        answer = complete_over_http(traced, trace_parent)
        num_output, num_prompt = answer["completion_tokens"], answer["prompt_tokens"]
    spans = collector.wait_for(lambda all_: names(all_, trace_id) == TREE.keys())

    own = {(span.service, span.name): span for span in spans if span.trace_id == trace_id}
    assert len(own) == sum(span.trace_id == trace_id for span in spans), "each comes once"
    for (service, name), parent in TREE.items():
        expected = client_id if parent == ("client", "") else own[parent].span_id
        assert own[service, name].parent_id == expected, name
        assert own[service, name].start_ns <= own[service, name].end_ns
        assert own[service, name].status == ""
    whole = own["tandem-gateway", "generate"].attributes
    decode = own["tandem-verifier", "decode"].attributes
    assert whole["gen_ai.usage.input_tokens"] == num_prompt
    assert whole["gen_ai.usage.output_tokens"] == num_output
    assert whole["gen_ai.operation.name"] == "text_completion"
    assert whole["gen_ai.response.model"] in models(traced)
    assert whole["gen_ai.response.finish_reasons"] == ["stop"]
    for name in ("steps", "drafts", "draft_tokens", "accepted_tokens"):
        assert whole[f"tandem.{name}"] == decode[f"tandem.{name}"] > 0, name
    assert own["tandem-drafter", "history"].attributes["tandem.tokens"] >= num_prompt
    for word in ("price", "return", "bill"):
        assert word.encode() not in collector.received, "of the prompt or the output"


def test_nothing_is_recorded_of_a_request_whose_client_does_not_sample_it(
    collector: Collector, traced: Service
) -> None:
    unwanted, unwanted_id, _ = new_trace_parent(is_sampled=False)
    generate_over_grpc(traced, unwanted)
    wanted, wanted_id, _ = new_trace_parent()
    generate_over_grpc(traced, wanted)
    # Each service sends its spans in order.
    spans = collector.wait_for(lambda all_: names(all_, wanted_id) == TREE.keys())
    assert not names(spans, unwanted_id)


def test_a_refused_request_is_a_failed_span(collector: Collector, traced: Service) -> None:
    trace_parent, trace_id, _ = new_trace_parent()
    with pytest.raises(grpc.RpcError):
        generate_over_grpc(traced, trace_parent, model_id="none")
    spans = collector.wait_for(lambda all_: bool(names(all_, trace_id)))
    (span,) = [span for span in spans if span.trace_id == trace_id]
    assert (span.name, span.status) == ("generate", "INVALID_ARGUMENT")
