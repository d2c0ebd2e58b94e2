"""A verifier that is lost or sends invalid events fails its own requests only."""

from typing import Any

import grpc
import pytest

from servicekit.errors import retry_after_ms
from tandem.v1 import gateway_pb2, sampling_pb2, verifier_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import Output, StartGateway, add, collect, error_of, read, until
from tests.gateway.scripted_verifier import CANCELLED, STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in


async def test_after_a_verifiers_end_a_client_gets_what_was_decided_then_unavailable(
    start_gateway: StartGateway, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_gateway(verifiers=[verifier.address], max_resumes=0)
    call = running.call(1)
    opened = await verifier.nth("open", 0)
    # What was decided is not shown yet when the verifier ends.
    monkeypatch.setattr(running.gateway.coordinator._delivery, "_publish", lambda _: None)
    verifier.send(verifier.decided(opened.sequence_id, 1, [5]))
    verifier.end_session()
    output = Output()
    add(output, await read(call))
    add(output, await read(call))
    assert output.token_ids == [5]
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_ms(error) == 1000


async def test_a_message_of_very_many_events_ends_the_session(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    verifier.send_response(verifier_pb2.SessionResponse(events=[verifier_pb2.Event()] * (1 << 14)))
    ignored = "tandem_peer_messages_ignored_total"
    await until(lambda: running.sample(ignored, peer="verifier", reason="odd_event") > 0)
    assert verifier.num_sessions == 1
    verifier.send_response(
        verifier_pb2.SessionResponse(events=[verifier_pb2.Event()] * ((1 << 14) + 1))
    )
    await until(lambda: verifier.num_sessions == 2)
    (lost,) = [entry for entry in running.log if entry["event"] == "peer_down"]
    assert "16385 events in one message" in str(lost)


async def test_without_a_verifier_requests_are_unavailable_and_health_says_so(
    start_gateway: StartGateway,
) -> None:
    running = await start_gateway(
        verifiers=["127.0.0.1:1"], is_serving=False, connect_timeout_s=0.05
    )
    error = await error_of(running.call(1))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_after_ms(error) == 1000
    assert running.sample("tandem_requests_shed_total", reason="no_verifier") == 1
    assert not (await running.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert not running.gateway.frontend.is_serving
    events = ["peer_unreachable", "request_ended"]
    await until(lambda: sorted(str(entry["event"]) for entry in running.log) == events)


IMPOSSIBLE_EVENTS = {
    "finish_reason": {"finish_reason": 77},
    "accepted more than drafted": {"num_draft_tokens": 2, "num_accepted_tokens": 3},
    "drafted more than may be": {"num_draft_tokens": 1 << 31},
    "accepted more than came": {"num_draft_tokens": 7, "num_accepted_tokens": 6},
    "outside the vocabulary": {"token_ids": [5, 2048]},
    "more than was asked for": {"token_ids": [5] * 21},
    "in the past": {"base_length": 0},
    "behind a gap": {"base_length": 9},
    "stopped without a token": {"token_ids": [], "finish_reason": STOP},
    "not ended at its limit": {"token_ids": [5] * 20},
    "cancelled by nobody": {"finish_reason": CANCELLED},
    "logprobs unasked for": {"logprobs": [sampling_pb2.TokenLogprob(token_id=5)]},
}


@pytest.mark.parametrize("fields", IMPOSSIBLE_EVENTS.values(), ids=IMPOSSIBLE_EVENTS)
async def test_an_impossible_event_fails_its_request_alone(
    start_gateway: StartGateway, verifier: ScriptedVerifier, fields: dict[str, Any]
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    wrong, right = running.call(1, max_new_tokens=20), running.call(1, 2)
    await verifier.nth("open", 1)
    opened = {len(command.token_ids): command for command in verifier.commands("open")}
    impossible = verifier_pb2.Decided(
        **{"sequence_id": opened[1].sequence_id, "base_length": 1, "token_ids": [5], **fields}
    )
    verifier.send(
        verifier_pb2.Event(decided=impossible), verifier.decided(opened[2].sequence_id, 2, [6])
    )
    error = await error_of(wrong)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert (await verifier.nth("close", 0)).sequence_id == opened[1].sequence_id
    # The session and the other sequence live; later events of the first are ignored.
    verifier.send(
        verifier.decided(opened[1].sequence_id, 2, [5]),
        verifier.decided(opened[1].sequence_id, 3, [], finish=CANCELLED),
        verifier.decided(opened[2].sequence_id, 3, [7], finish=1),
    )
    assert (await collect(right)).token_ids == [6, 7]
    assert verifier.num_sessions == 1
    ignored = {
        reason: running.sample("tandem_peer_messages_ignored_total", peer="verifier", reason=reason)
        for reason in ("odd_event", "unknown_sequence", "internal_error")
    }
    assert ignored == {"odd_event": 1, "unknown_sequence": 0, "internal_error": 0}


async def test_events_count_only_from_the_verifier_that_owns_the_sequence(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier(), await start_verifier()]
    running = await start_gateway(verifiers=[verifier.address for verifier in verifiers])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    call = running.call(1)
    await until(lambda: sum(len(v.commands("open")) for v in verifiers) == 1)
    owner, other = sorted(verifiers, key=lambda v: -len(v.commands("open")))
    (opened,) = owner.commands("open")
    for finish in (0, 0, STOP):
        other.send(other.decided(opened.sequence_id, 1, [666], finish=finish))
    other.send(other.rejected(opened.sequence_id, code=3, message="no"))
    other.send(other.decided("of nobody", 1, [667]))

    def num_ignored(reason: str) -> float:
        return running.sample("tandem_peer_messages_ignored_total", peer="verifier", reason=reason)

    await until(lambda: num_ignored("foreign_sequence") == 4)
    await until(lambda: num_ignored("unknown_sequence") == 1)
    owner.send(owner.decided(opened.sequence_id, 1, [5], finish=STOP))
    assert (await collect(call)).token_ids == [5]
    logged = [e["reason"] for e in running.log if e["event"] == "peer_message_ignored"]
    assert logged == ["foreign_sequence", "unknown_sequence"], "each once, however many"
    owner.send(owner.decided(opened.sequence_id, 2, [6]))
    await until(lambda: num_ignored("unknown_sequence") == 2)


async def test_a_models_limits_are_its_narrowest_verifiers(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    one = await start_verifier(max_model_len=20, max_num_speculative_tokens=7, vocab_size=60)
    two = await start_verifier(max_model_len=100, max_num_speculative_tokens=3, vocab_size=50)
    running = await start_gateway(verifiers=[one.address, two.address])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    (model,) = (await running.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert (model.max_model_len, model.max_num_speculative_tokens) == (20, 3)
    assert (model.vocab_size, model.num_verifiers) == (50, 2)
    for prompt in ([1] * 20, [55]):
        error = await error_of(running.call(*prompt))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_peer_without_a_welcome_gets_no_requests(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier._welcome = lambda session: session.send(  # type: ignore[method-assign]
        verifier.opened("unknown")
    )
    running = await start_gateway(verifiers=[verifier.address], is_serving=False)
    await until(lambda: verifier.num_ended_sessions >= 2)
    assert not running.gateway.frontend.is_serving


@pytest.mark.parametrize("field", ["model_id", "model_digest"])
async def test_a_model_that_no_request_can_name_is_not_served(
    start_gateway: StartGateway, verifier: ScriptedVerifier, field: str
) -> None:
    setattr(verifier, field, "m" * 257)
    running = await start_gateway(verifiers=[verifier.address], is_serving=False)
    await until(lambda: verifier.num_ended_sessions > 0)
    await until(lambda: bool(running.log))
    assert f"257 bytes of {field}" in str(running.log[0]["reason"])
    setattr(verifier, field, "m" * 256)
    await until(lambda: running.gateway.frontend.is_serving)
