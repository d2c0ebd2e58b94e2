"""A bug of the gateway fails one request or one stream, and is counted and logged."""

import asyncio
from pathlib import Path

import grpc
import pytest
import structlog
from prometheus_client import CollectorRegistry

from gateway.api import wire
from gateway.generation.generation import Generation
from gateway.messages.verifier import Decided
from gateway.metrics import GatewayMetrics
from gateway.peers.ignored_messages import IgnoredMessages
from gateway.text.tokenizer import Tokenizer
from tests.gateway.running_gateway import RunningGateway, StartGateway, collect, error_of, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in


def num_internal_errors(running: RunningGateway) -> float:
    return running.sample(
        "tandem_peer_messages_ignored_total", peer="verifier", reason="internal_error"
    )


async def assert_seven_fails_alone(running: RunningGateway, verifier: ScriptedVerifier) -> None:
    """Of two requests, the one that gets token 7 fails."""
    wrong, right = running.call(1), running.call(1, 2)
    await verifier.nth("open", 1)
    opened = {len(command.token_ids): command for command in verifier.commands("open")}
    verifier.send(
        verifier.decided(opened[1].sequence_id, 1, [7]),
        verifier.decided(opened[2].sequence_id, 2, [6], finish=1),
    )
    error, output = await asyncio.gather(error_of(wrong), collect(right))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert output.token_ids == [6]
    assert (await verifier.nth("close", 0)).sequence_id == opened[1].sequence_id


async def test_an_event_that_cannot_be_appended_fails_its_request_alone(
    start_gateway: StartGateway, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    append = Generation.append

    def fail_on_seven(generation: Generation, decided: Decided) -> None:
        if decided.token_ids == [7]:
            raise RuntimeError("cannot be appended")
        append(generation, decided)

    monkeypatch.setattr(Generation, "append", fail_on_seven)
    await assert_seven_fails_alone(running, verifier)
    assert num_internal_errors(running) == 1


async def test_a_text_that_cannot_be_made_fails_its_request_alone(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    find_bytes = Tokenizer._find_bytes

    def fail_on_seven(tokenizer: Tokenizer, token_id: int) -> bytes:
        if token_id == 7:
            raise RuntimeError("cannot be decoded")
        return find_bytes(tokenizer, token_id)

    monkeypatch.setattr(Tokenizer, "_find_bytes", fail_on_seven)
    await assert_seven_fails_alone(running, verifier)
    assert any(entry["event"] == "rpc_failed" for entry in running.log)


async def test_every_request_of_a_lost_verifier_fails(
    start_gateway: StartGateway, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_gateway(verifiers=[verifier.address], max_resumes=0)
    calls = [running.call(1), running.call(1, 2)]
    await verifier.nth("open", 1)
    sequences = running.gateway.coordinator._sequences
    forget, num_forgotten = sequences.forget, 0

    def fail_once(*args: object, **fields: object) -> None:
        nonlocal num_forgotten
        num_forgotten += 1
        forget(*args, **fields)  # type: ignore[arg-type]
        if num_forgotten == 1:
            raise RuntimeError("cannot be forgotten")

    monkeypatch.setattr(sequences, "forget", fail_once)
    verifier.end_session()
    errors = await asyncio.gather(*(error_of(call) for call in calls))
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert num_internal_errors(running) == 1


async def test_a_link_reconnects_after_an_error_while_it_went_down(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address])

    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("cannot be reported")

    (link,) = running.gateway.fleet.verifiers
    monkeypatch.setattr(link._stream._handler, "on_down", fail)
    verifier.end_session()
    await until(lambda: verifier.num_sessions == 2)
    assert num_internal_errors(running) == 1
    assert any(entry["event"] == "peer_stream_failed" for entry in running.log)
    assert not running.gateway.failed.done()
    await until(lambda: link.welcome is not None)
    assert (await running.generate(1)).token_ids == [5, 0]


def test_repeated_ignored_messages_are_all_counted_and_logged_once_a_minute() -> None:
    now_s = 0.0
    log = structlog.testing.LogCapture()
    registry = CollectorRegistry()
    ignored = IgnoredMessages(
        verifier="here",
        metrics=GatewayMetrics(registry),
        logger=structlog.wrap_logger(
            None,
            processors=[log],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
        ),
        clock=lambda: now_s,
    )
    for step in range(1, 1201):
        now_s = step / 10
        ignored.record("odd_event", "x" * 10_000)
    assert (
        registry.get_sample_value(
            "tandem_peer_messages_ignored_total", {"peer": "verifier", "reason": "odd_event"}
        )
        == 1200
    )
    assert [entry["num_unlogged"] for entry in log.entries] == [0, 599]
    assert all(len(entry["detail"]) == 200 for entry in log.entries)


async def test_a_message_that_cannot_be_made_counts_as_an_error(
    start_gateway: StartGateway, verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_gateway(verifiers=[verifier.address])

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(wire, "event_to_proto", fail)
    error = await error_of(running.call(1, 2))
    assert error.code() == grpc.StatusCode.INTERNAL
    await running.until_idle()
    assert running.sample("tandem_request_errors_total", code="INTERNAL") == 1
    [entry] = [each for each in running.log if each["event"] == "request_ended"]
    assert entry["status"] == "INTERNAL"
