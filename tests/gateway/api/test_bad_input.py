"""Bad input (docs/acceptance.md) fails alone, with its status and its field's name.

The server keeps serving.
"""

from pathlib import Path
from typing import Any

import grpc
import pytest

from servicekit.errors import field_violation, retry_after_ms
from tandem.v1 import gateway_pb2, sampling_pb2
from tests.gateway.running_gateway import StartGateway, error_of
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

Sampling = sampling_pb2.SamplingParams
Speculation = sampling_pb2.SpeculationParams

# Fields that the contract once had, as older clients send them.
RESERVED_FIELDS = {
    "16": gateway_pb2.GenerateRequest.FromString(b"\x82\x01\x01a"),  # adapter_id
    "17": gateway_pb2.GenerateRequest.FromString(b"\x8a\x01\x01a"),  # media
    "sampling.14": gateway_pb2.GenerateRequest(
        sampling=Sampling.FromString(b"\x70\x02")  # num_beams
    ),
    "speculation.10": gateway_pb2.GenerateRequest(
        speculation=Speculation.FromString(b"\x50\x01")  # chained
    ),
    "speculation.15": gateway_pb2.GenerateRequest(
        speculation=Speculation.FromString(b"\x78\x40")  # pool_feed_tokens
    ),
    "speculation.17": gateway_pb2.GenerateRequest(
        speculation=Speculation.FromString(b"\x88\x01\x02")  # tree_width
    ),
}

INVALID: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("text", {"text": ""}),
    ("model_id", {"text": "x", "model_id": "unknown"}),
    ("request_id", {"text": "x", "request_id": "x" * 257}),
    ("request_id", {"text": "x", "request_id": "é" * 129}),
    ("model_id", {"text": "x", "model_id": "x" * 257}),
    ("text", {"text": "x" * (4 * 1024 * 1024 - 1024)}),
    ("tokens.token_ids", {"tokens": gateway_pb2.TokenIds(token_ids=[1] * (1 << 20 | 1))}),
    ("output_token_ids", {"text": "x", "output_token_ids": [1] * (1 << 20 | 1)}),
    ("stop_sequences", {"text": "x", "stop_sequences": ["x"] * 17}),
    ("stop_sequences[1]", {"text": "x", "stop_sequences": ["x", "x" * 257]}),
    ("stop_token_ids", {"text": "x", "stop_token_ids": [1] * 65}),
    ("affinity_key", {"text": "x", "affinity_key": "x" * 257}),
    (
        "sampling.logit_bias",
        {"text": "x", "sampling": Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))},
    ),
    ("speculation.pool", {"text": "x", "speculation": Speculation(pool="p" * 129)}),
    (
        "speculation.num_speculative_tokens",
        {"text": "x", "speculation": Speculation(num_speculative_tokens=8)},
    ),
]


async def test_bad_input_is_refused_by_its_field_and_the_server_keeps_serving(
    start_gateway: StartGateway, verifier: ScriptedVerifier, model_folder: Path
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    for field, fields in INVALID:
        error = await error_of(running.call(**fields))
        violation = field_violation(error)
        assert violation is not None, fields
        assert (error.code(), violation[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert violation[1] == error.details() != ""
    assert not verifier.commands("open")
    assert (await running.generate(text="x")).token_ids == [5, 0]


async def test_a_request_over_4_mib_is_invalid_and_not_overload(
    start_gateway: StartGateway, verifier: ScriptedVerifier, model_folder: Path
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    error = await error_of(running.call(text="x" * (4 * 1024 * 1024)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_violation(error) == ("text", error.details())
    assert "bytes" in str(error.details()), "it must be refused before it is tokenised"


async def test_a_call_over_a_limit_of_the_proto_counts_among_calls_and_not_among_requests(
    start_gateway: StartGateway, verifier: ScriptedVerifier, model_folder: Path
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    for stops in (["x"] * 17, [""]):
        error = await error_of(running.call(text="x", stop_sequences=stops))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    # The gateway itself has refused the second one.
    assert running.sample("tandem_requests_received_total") == 1
    assert running.sample("tandem_request_errors_total") == 1
    assert running.sample("tandem_rpc_requests_total", code="INVALID_ARGUMENT") == 2
    assert len([entry for entry in running.log if entry["event"] == "request_ended"]) == 1


async def test_a_field_of_another_version_is_refused_by_its_number_and_never_ignored(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address])
    newer = gateway_pb2.GenerateRequest.FromString(b"\xa0\x3f\x01")  # field 1012: 1
    grammar = sampling_pb2.StructuredOutput.FromString(newer.SerializeToString())
    for field, unknown in (
        ("1012", newer),
        (
            "sampling.structured_output.1012",
            gateway_pb2.GenerateRequest(sampling=Sampling(structured_output=grammar)),
        ),
        *RESERVED_FIELDS.items(),
    ):
        unknown.tokens.token_ids.extend([1, 2])
        error = await error_of(running.stub.Generate(unknown))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert field_violation(error) == (field, error.details())
    assert not verifier.commands("open")
    assert (await running.generate(1, 2)).token_ids == [5, 0]


@pytest.mark.parametrize(
    ("asked", "rejected", "status", "field"),
    [
        (
            {"sampling": Sampling(min_p=0.5)},
            {"code": 12, "message": "not there yet", "field": "sampling.min_p"},
            grpc.StatusCode.UNIMPLEMENTED,
            "sampling.min_p",
        ),
        (
            {},
            {"code": 3, "message": "bad", "field": "num_speculative_tokens"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "speculation.num_speculative_tokens",
        ),
        (
            {},
            {"code": 8, "message": "full", "retry_after_ms": 250},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "",
        ),
        ({}, {"code": 4, "message": "no draft"}, grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        ({}, {"code": 9, "message": "other"}, grpc.StatusCode.FAILED_PRECONDITION, ""),
        ({}, {"code": 13, "message": "not finite"}, grpc.StatusCode.INTERNAL, ""),
        ({}, {"code": 14, "message": "draining"}, grpc.StatusCode.UNAVAILABLE, ""),
        ({}, {"code": 99, "message": "what"}, grpc.StatusCode.INTERNAL, ""),
    ],
)
async def test_a_client_gets_the_verifiers_own_refusal(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    asked: dict[str, Any],
    rejected: dict[str, Any],
    status: grpc.StatusCode,
    field: str,
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, **asked)
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.rejected(opened.sequence_id, **rejected))
    error = await error_of(call)
    assert (error.code(), error.details()) == (status, rejected["message"])
    violation = field_violation(error)
    assert (violation[0] if violation else "") == field
    assert retry_after_ms(error) == rejected.get("retry_after_ms")
    assert not verifier.commands("close"), "it is over there already"
