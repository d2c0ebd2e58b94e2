"""Limits on requests, draining, and health."""

import asyncio
from pathlib import Path

import grpc
import pytest

from gateway.api.request_texts import RequestTexts
from servicekit.errors import field_violation, retry_after_ms
from tandem.v1.sampling_pb2 import SpeculationParams
from tests.gateway.running_gateway import (
    StartGateway,
    collect,
    error_of,
    read,
    until,
)
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in


async def test_requests_over_the_limit_are_refused_with_a_retry_hint(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], max_concurrent_requests=3)
    calls = [running.call(1, n=2), running.call(1)]
    await verifier.nth("open", 2)
    error = await error_of(running.call(1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after_ms(error) == 1000
    assert running.sample("tandem_requests_shed_total", reason="concurrency") == 1
    assert running.sample("tandem_request_errors_total", code="RESOURCE_EXHAUSTED") == 1
    assert running.sample("tandem_requests_received_total") == 3
    calls[0].cancel()
    await verifier.nth("close", 1)
    verifier.play(lambda opened: [5, 0])
    assert (await running.generate(1)).token_ids == [5, 0]
    calls[1].cancel()


async def test_a_request_that_its_verifier_has_no_room_for_is_shed_once(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, n=2)
    for index in range(2):
        opened = await verifier.nth("open", index)
        verifier.send(verifier.rejected(opened.sequence_id, code=8, message="full"))
    error = await error_of(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert running.sample("tandem_requests_shed_total", reason="verifier_full") == 1
    assert running.sample("tandem_requests_shed_total") == 1
    assert running.sample("tandem_request_errors_total", code="RESOURCE_EXHAUSTED") == 1
    assert running.sample("tandem_requests_unread_total") == 0


async def test_waiting_tokens_are_bounded_as_a_sum(
    start_gateway: StartGateway, verifier: ScriptedVerifier, model_folder: Path
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], tokenizer=model_folder, max_waiting_tokens=100
    )
    # Alone, a request may exceed the limit: otherwise it would never be admitted.
    large = running.call(*range(100, 170), n=2)
    opened = [await verifier.nth("open", index) for index in range(2)]
    hints = []
    for late in (running.call(5), running.call(text="a short text"), running.call(text="x" * 500)):
        error = await error_of(late)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints.append(retry_after_ms(error) or 0)
    assert hints[0] == 1000
    assert hints == sorted(set(hints)), "the more are refused, the longer each is to wait"
    assert running.sample("tandem_requests_shed_total", reason="waiting_tokens") == 3
    # Of two choices one begins: 70 tokens wait.
    verifier.send(verifier.decided(opened[0].sequence_id, 70, [5]))
    await read(large)
    assert (await read(large)).chunk.token_ids == [5]
    small = running.call(*range(100, 130))
    await verifier.nth("open", 2)
    error = await error_of(running.call(5))
    assert "100 prompt tokens are waiting" in (error.details() or "")
    small.cancel()
    await verifier.nth("close", 0)
    verifier.play(lambda opened: [5, 0])
    await running.generate(5, output_token_ids=[6] * 29)
    predicting = SpeculationParams(prediction="x" * 200)
    for fields in ({"output_token_ids": [6] * 30}, {"speculation": predicting}):
        error = await error_of(running.call(5, **fields))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    large.cancel()


async def test_a_text_that_finds_no_room_is_not_even_encoded(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], tokenizer=model_folder, max_waiting_tokens=100
    )
    first = running.call(*range(100, 170))
    await verifier.nth("open", 0)
    # It would be an internal error.
    monkeypatch.delattr(RequestTexts, "encode_prompt")
    error = await error_of(running.call(text="a text " * 200))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()


async def test_draining_refuses_new_requests_and_lets_the_others_finish(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1)
    await read(call)
    opened = await verifier.nth("open", 0)
    draining = asyncio.ensure_future(running.gateway.drain())
    await until(lambda: not running.gateway.frontend.is_serving)
    error = await error_of(running.call(1))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert running.sample("tandem_requests_shed_total", reason="draining") == 1
    assert not draining.done()
    verifier.send(verifier.decided(opened.sequence_id, 1, [5], finish=STOP))
    assert (await collect(call)).token_ids == [5]
    await asyncio.wait_for(draining, 60)


async def test_more_choices_than_may_ever_be_generated_at_a_time_are_no_overload(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], max_concurrent_requests=3)
    error = await error_of(running.call(1, n=4))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_violation(error) == ("n", "4 choices are over the limit of 3 at a time")
    assert retry_after_ms(error) is None
