"""Both clients of a gateway against a stand-in gateway on loopback.

Each test runs once per client, the blocking one in threads.
"""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from tandem import wire
from tandem.client import (
    AsyncTandemClient,
    Chunk,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    ReportedToken,
    RetryPolicy,
    SamplingParams,
    SpeculationParams,
    Started,
    StructuredOutput,
    TandemClient,
    TandemError,
)
from tandem.v1 import gateway_pb2, sampling_pb2
from tests.client.in_thread import InThread
from tests.client.stand_in_gateway import StandInGateway, refusal

pytestmark = pytest.mark.stand_in
REQUEST = GenerationRequest(prompt="ren")
# test_failover.py tests what is tried again.
IMPATIENT = RetryPolicy(max_attempts=2)


async def events_of(
    connect: Any, target: str, request: GenerationRequest, timeout_s: float | None = None
) -> list[Event]:
    async with connect(target) as client:
        return [event async for event in client.stream(request, timeout_s=timeout_s)]


async def generation_of(connect: Any, target: str, request: GenerationRequest) -> Generation:
    async with connect(target) as client:
        generation = await client.generate(request)
        assert isinstance(generation, Generation)
        return generation


def blocking_client(target: str, **options: Any) -> InThread:
    return InThread(TandemClient(target, retry=IMPATIENT, **options))


def asyncio_client(target: str, **options: Any) -> AsyncTandemClient:
    return AsyncTandemClient(target, retry=IMPATIENT, **options)


@pytest.fixture(params=[blocking_client, asyncio_client])
def connect(request: pytest.FixtureRequest) -> Any:
    """Makes a client, of each kind in turn."""
    return request.param


async def test_a_stream_yields_started_chunks_and_finished_in_order(
    gateway: StandInGateway, connect: Any
) -> None:
    started, first, second, finished = await events_of(connect, gateway.address, REQUEST)
    assert started == Started(request_id="r-1", seed=2**64 - 1, num_prompt_tokens=4)
    assert isinstance(first, Chunk)
    assert (first.offset, first.token_ids, first.text, first.num_draft_tokens) == (0, (7,), "né", 0)
    assert isinstance(second, Chunk)
    assert (second.token_ids, second.num_draft_tokens, second.num_accepted_tokens) == (
        (8, 9, 10),
        3,
        2,
    )
    assert isinstance(finished, Finished)
    assert finished.usage.accepted_per_position == (1, 1, 0)


async def test_reported_tokens_come_with_chunks_and_with_the_result(
    gateway: StandInGateway, connect: Any
) -> None:
    tokens = [("n", False), ("", True), ("é", True)]
    for response in gateway.script[1:3]:
        for text, accepted in tokens:
            response.chunk.reported_tokens.add(text=text, accepted=accepted)
    request = GenerationRequest(prompt="ren", report_tokens=True)
    _, first, _, _ = await events_of(connect, gateway.address, request)
    expected = tuple(ReportedToken(text=text, accepted=accepted) for text, accepted in tokens)
    assert isinstance(first, Chunk)
    assert first.reported_tokens == expected
    generation = await generation_of(connect, gateway.address, request)
    assert generation.choices[0].reported_tokens == expected * 2
    assert all(each.report_tokens for each in gateway.requests)


async def test_every_field_reaches_the_wire(gateway: StandInGateway, connect: Any) -> None:
    """`tests/integration/test_parameters.py` has those of sampling and drafts."""
    fields: dict[str, Any] = {
        "max_new_tokens": 9,
        "stop_sequences": ["\n\n"],
        "stop_token_ids": [0],
        "ignore_eos": True,
        "n": 1,
        "request_id": "mine",
        "model_id": "demo",
        "output_token_ids": [7],
        "expected_model_digest": "digest",
        "affinity_key": "user",
        "priority": -1,
        "trace": True,
        "report_tokens": True,
    }
    request = GenerationRequest(
        prompt=[1, 2],
        sampling=SamplingParams(top_k=3),
        speculation=SpeculationParams(enabled=False),
        **fields,
    )
    await events_of(connect, gateway.address, request)
    expected = gateway_pb2.GenerateRequest(
        tokens=gateway_pb2.TokenIds(token_ids=[1, 2]),
        sampling=sampling_pb2.SamplingParams(top_k=3),
        speculation=sampling_pb2.SpeculationParams(enabled=False),
        **fields,
    )
    assert gateway.requests == [expected]
    unset = {field.name for field in expected.DESCRIPTOR.fields} - {
        field.name for field, _ in expected.ListFields()
    }
    assert unset == {"text"}, "a new field of the wire contract needs a place in the client"


async def test_absent_options_stay_absent_on_the_wire(
    gateway: StandInGateway, connect: Any
) -> None:
    await events_of(connect, gateway.address, REQUEST)
    [request] = gateway.requests
    assert request.text == "ren"
    assert not request.sampling.ListFields()
    assert not request.speculation.ListFields()
    assert not request.HasField("max_new_tokens")
    assert not request.HasField("n")


INVALID, OVERLOAD = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
REFUSALS = [
    (refusal(INVALID, "over 1", field="sampling.top_p"), "sampling.top_p: over 1", None),
    # Where the message names the field, too.
    (refusal(INVALID, "n: over 16", field="n"), "n: over 16", None),
    (refusal(INVALID, "no"), "no", None),
    (refusal(OVERLOAD, "full", retry_ms=250), "full", 0.25),
    (refusal(OVERLOAD, "full", retry_ms=-250), "full", 0.0),
    (refusal(OVERLOAD, "full", retry_ms=10**21), "full", 1e18),
]


@pytest.mark.parametrize(("failure", "shown", "retry_after_s"), REFUSALS)
async def test_a_refusal_carries_its_field_and_retry_advice(
    gateway: StandInGateway, connect: Any, failure: Any, shown: str, retry_after_s: float | None
) -> None:
    gateway.failure = failure
    with pytest.raises(TandemError) as caught:
        await generation_of(connect, gateway.address, REQUEST)
    assert caught.value.code is (INVALID if retry_after_s is None else OVERLOAD)
    assert (str(caught.value), caught.value.retry_after_s) == (shown, retry_after_s)
    assert caught.value.field == shown.rpartition(":")[0]


async def test_a_detail_that_cannot_be_read_is_passed_over(
    gateway: StandInGateway, connect: Any
) -> None:
    async def fail(context: Any) -> None:
        status = status_pb2.Status(code=8, message="full")
        kind = "type.googleapis.com/google.rpc.{}".format
        for garbled in (kind("BadRequest"), kind("RetryInfo")):
            status.details.add(type_url=garbled, value=b"\xff\xff\xff")
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 3}))
        details = ("grpc-status-details-bin", status.SerializeToString())
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (details,))

    gateway.failure = fail
    with pytest.raises(TandemError) as caught:
        await generation_of(connect, gateway.address, REQUEST)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (caught.value.field, caught.value.retry_after_s) == ("", 3.0)


async def test_a_deadline_ends_the_call_on_both_sides(
    gateway: StandInGateway, connect: Any
) -> None:
    gateway.hang = True
    with pytest.raises(TandemError) as caught:
        await events_of(connect, gateway.address, REQUEST, timeout_s=1.0)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await gateway.cancelled.wait()


async def test_cancelling_the_task_cancels_the_call(gateway: StandInGateway) -> None:
    gateway.hang = True
    got_all = asyncio.Event()

    async def read() -> None:
        async for event in client.stream(REQUEST):
            if isinstance(event, Finished):
                got_all.set()

    async with AsyncTandemClient(gateway.address) as client:
        task = asyncio.create_task(read())
        await got_all.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gateway.cancelled.wait()


@pytest.mark.parametrize("num_events", [0, 1, 3])
async def test_a_stream_that_ends_without_finished_is_an_error(
    gateway: StandInGateway, connect: Any, num_events: int
) -> None:
    gateway.script = gateway.script[:num_events]
    with pytest.raises(TandemError) as caught:
        await generation_of(connect, gateway.address, REQUEST)
    assert caught.value.code is grpc.StatusCode.INTERNAL


async def test_an_unknown_event_of_a_newer_server_is_skipped(
    gateway: StandInGateway, connect: Any
) -> None:
    gateway.script.insert(1, gateway_pb2.GenerateResponse())
    assert (await generation_of(connect, gateway.address, REQUEST)).token_ids == (7, 8, 9, 10)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest(prompt="x", max_new_tokens=-1), "max_new_tokens"),
        (GenerationRequest(prompt=[2**32]), "tokens.token_ids"),
        (
            GenerationRequest(prompt="x", sampling=SamplingParams(logit_bias={-1: 0.0})),
            "sampling.logit_bias",
        ),
        # They would become lists of their characters.
        (GenerationRequest(prompt="x", stop_sequences="END"), "stop_sequences"),
        (GenerationRequest(prompt=b"x"), "tokens.token_ids"),
    ],
)
async def test_a_value_that_no_message_can_hold_is_refused_as_by_a_server(
    gateway: StandInGateway, connect: Any, request_: GenerationRequest, field: str
) -> None:
    with pytest.raises(TandemError) as caught:
        await generation_of(connect, gateway.address, request_)
    assert (caught.value.code, caught.value.field) == (INVALID, field)
    assert "\n" not in str(caught.value)
    assert gateway.requests == []


async def test_a_text_is_loaded_into_a_pool(gateway: StandInGateway, connect: Any) -> None:
    async with connect(gateway.address) as client:
        assert await client.load_pool("docs", "a text", model_id="demo") == 6
        with pytest.raises(TandemError) as caught:
            await client.load_pool("docs", "\ud800")
    assert (caught.value.code, caught.value.field) == (INVALID, "text")
    assert gateway.loaded == [
        gateway_pb2.LoadPoolRequest(model_id="demo", pool="docs", text="a text")
    ]


def test_a_schema_of_any_value_is_a_schema_and_what_is_no_json_is_refused() -> None:
    def of_schema(schema: Any) -> Any:
        output = StructuredOutput(json_schema=schema)
        request = GenerationRequest(prompt="a", sampling=SamplingParams(structured_output=output))
        return wire.to_request(request).sampling.structured_output

    assert of_schema({}).json_schema == "{}"
    with pytest.raises(TandemError, match="is no JSON") as caught:
        of_schema({"enum": {1}})
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == "sampling.structured_output.json_schema"
