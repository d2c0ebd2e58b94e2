"""A verifier that is lost or sends invalid events fails its own requests only."""

import contextlib
from typing import Any

import grpc
import pytest

from gateway.messages.verifier import CloseCommand
from servicekit.errors import field_violation, retry_after_ms
from tandem.v1 import gateway_pb2, sampling_pb2, verifier_pb2
from tandem.values import Keep
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


async def test_commands_unsent_at_a_verifiers_end_are_dropped(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], max_resumes=0)
    call = running.call(1)
    await verifier.nth("open", 0)
    (link,) = running.gateway.fleet.verifiers
    (sequence_id,) = running.gateway.coordinator._sequences._by_id
    link.update(sequence_id, drafter="a:1")
    link.close(CloseCommand("another", Keep.NOTHING, 0), has_ended=False)
    link.on_down("gone")  # before the writer had its turn
    assert link.next_request() is None
    assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert link.is_idle


async def test_a_verifier_that_comes_back_is_used_again(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address])
    verifier.end_session()
    await until(lambda: verifier.num_sessions == 2)
    await until(lambda: running.gateway.frontend.is_serving)
    assert (await running.generate(1)).token_ids == [5, 0]


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


async def test_a_verifier_shuts_down_once(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    """Each time, all models of the fleet are counted anew."""
    running = await start_gateway(verifiers=[verifier.address])
    verifier.send(*[verifier.draining()] * 3)
    await until(lambda: not running.gateway.frontend.is_serving)
    ignored = "tandem_peer_messages_ignored_total"
    assert running.sample(ignored, peer="verifier", reason="odd_event") == 2


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


async def test_only_the_requests_of_the_lost_verifier_fail(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier(), await start_verifier()]
    running = await start_gateway(
        verifiers=[verifier.address for verifier in verifiers], max_resumes=0
    )
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    calls = [running.call(index) for index in range(8)]  # the bound on loads spreads them
    await until(lambda: sum(len(v.commands("open")) for v in verifiers) == 8)
    lost, kept = verifiers
    num_lost = len(lost.commands("open"))
    assert 0 < num_lost < 8
    lost.end_session()
    for opened in kept.commands("open"):
        kept.send(kept.decided(opened.sequence_id, 1, [7], finish=1))
    ends = []
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await collect(call)
        ends.append((await call.code()).name)
    assert sorted(ends) == ["OK"] * (8 - num_lost) + ["UNAVAILABLE"] * num_lost
    assert running.gateway.frontend.is_serving


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


async def test_a_rejected_command_without_a_sequence_is_only_logged(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address])
    verifier.send(verifier.rejected("", code=3, message="unknown command"))
    assert (await running.generate(1)).token_ids == [5, 0]
    assert [
        (e["reason"], e["detail"]) for e in running.log if e["event"] == "peer_message_ignored"
    ] == [("rejected_command", "unknown command")]


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


async def test_a_request_goes_to_a_verifier_of_its_model(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier() for _ in range(2)]
    for index, verifier in enumerate(verifiers):
        verifier.model_id = f"model-{index}"
        verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address for verifier in verifiers])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    for index in range(8):
        await running.generate(1, model_id="model-1", affinity_key=f"key {index}")
    assert [len(verifier.commands("open")) for verifier in verifiers] == [0, 8]
    error = await error_of(running.call(1))
    assert (error.code(), field_violation(error)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        ("model_id", "name one of the models served: model-0, model-1"),
    )


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


async def test_a_client_that_reads_late_gets_all_its_logprobs(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifier = await start_verifier(max_model_len=50_000)
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, sampling=sampling_pb2.SamplingParams(logprobs=20))
    opened = await verifier.nth("open", 0)
    top = [sampling_pb2.TokenLogprob(token_id=i, logprob=-1.5, rank=i) for i in range(20)]
    for index in range(30_016 // 32):
        event = verifier.decided(opened.sequence_id, 1 + 32 * index, [7] * 32)
        event.decided.logprobs.extend(
            sampling_pb2.TokenLogprob(token_id=7, logprob=-0.5, rank=1, top=top) for _ in range(32)
        )
        if index == 30_016 // 32 - 1:
            event.decided.finish_reason = STOP
        verifier.send(event)
    # Nothing is read before all of it was decided.
    await until(lambda: not running.gateway.coordinator._sequences._by_id)
    await until(lambda: running.gateway.coordinator._delivery.is_idle)
    output = await collect(call)
    assert output.token_ids == [7] * 30_016
    assert [len(each.top) for chunk in output.chunks for each in chunk.logprobs] == [20] * 30_016
