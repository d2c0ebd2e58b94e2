"""A verifier that is lost, stuck or shutting down loses no request and no token."""

import functools
from pathlib import Path

import grpc
import pytest

from gateway.peers.verifier_link import VerifierLink
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import sampling_pb2
from tests.gateway.fleet import StartFleet
from tests.gateway.running_gateway import (
    Output,
    add,
    collect,
    error_of,
    read,
    until,
)
from tests.gateway.scripted_verifier import LENGTH, STOP

pytestmark = pytest.mark.stand_in


async def test_another_verifier_goes_on_where_the_lost_one_ended(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(2)
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=7, presence_penalty=0.5)
    call = fleet.running.call(1, 2, sampling=sampling, max_new_tokens=9)
    lost, first = await fleet.owner()
    lost.send(lost.opened(first.sequence_id, 1), lost.decided(first.sequence_id, 2, [5, 6]))
    output = Output()
    add(output, await read(call))
    add(output, await read(call))
    lost.end_session()
    other, second = await fleet.owner(2)
    assert other is not lost
    assert second.sequence_id != first.sequence_id, "a drafter may still know the first one"
    assert list(second.token_ids) == [1, 2, 5, 6]
    assert (second.prompt_length, second.max_new_tokens) == (2, 9)
    assert second.sampling == first.sampling
    other.send(
        other.opened(second.sequence_id, 4), other.decided(second.sequence_id, 4, [7], finish=STOP)
    )
    rest = await collect(call)
    assert [chunk.offset for chunk in (*output.chunks, *rest.chunks)] == [0, 2]
    assert output.token_ids + rest.token_ids == [5, 6, 7]
    await fleet.running.until_idle()
    (line,) = [each for each in fleet.running.log if each["event"] == "request_ended"]
    assert (line["status"], line["resumes"]) == ("OK", 1)
    assert rest.started is None
    (finished,) = rest.finished
    assert (finished.usage.resumes, finished.usage.cached_tokens) == (1, 1)
    assert fleet.num_resumes("verifier_gone") == 1
    (line,) = [entry for entry in fleet.running.log if entry["event"] == "choice_resumed"]
    assert line["former_sequence_id"] == first.sequence_id


async def test_a_verifier_with_the_same_numerics_is_preferred(start_fleet: StartFleet) -> None:
    for _ in range(4):
        fleet = await start_fleet(4, ["a", "b", "a", "b"])
        call = fleet.running.call(1)
        lost, first = await fleet.owner()
        lost.send(lost.decided(first.sequence_id, 1, [5]))
        await read(call)
        await read(call)
        lost.end_session()
        other, second = await fleet.owner(2)
        assert other.numerics_digest == lost.numerics_digest
        other.send(other.decided(second.sequence_id, 2, [6], finish=STOP))
        assert (await collect(call)).token_ids == [6]


async def test_a_verifier_that_comes_is_used_at_once(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routing.resumption._RETRY_INTERVAL_S", 600.0)
    fleet = await start_fleet(1)
    (verifier,) = fleet.verifiers
    calls = [fleet.running.call(1, 2 + index) for index in range(40)]
    await verifier.nth("open", 39)
    verifier.play(lambda opened: [5, 0])
    verifier.end_session()
    for call in calls:
        assert (await collect(call)).token_ids == [5, 0]


async def test_a_request_moves_a_bounded_number_of_times(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(2, max_resumes=2)
    call = fleet.running.call(1)
    for count in (1, 2, 3):
        verifier, opened = await fleet.owner(count)
        verifier.send(verifier.opened(opened.sequence_id))
        verifier.end_session()
        await until(lambda: all(link.welcome for link in fleet.running.gateway.fleet.verifiers))
    assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert fleet.num_resumes("verifier_gone") == 2


async def test_a_stop_string_in_what_was_decided_ends_the_request(
    start_fleet: StartFleet,
    model_folder: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = await start_fleet(2, tokenizer=model_folder)
    tokens = tokenizer.encode("STOP and more", max_tokens=20)
    call = fleet.running.call(text="a", stop_sequences=["STOP"])
    lost, opened = await fleet.owner()
    # The session ends before the tokens become text.
    monkeypatch.setattr(fleet.running.gateway.coordinator._delivery, "_publish", lambda _: None)
    length = len(opened.token_ids)
    lost.send(lost.decided(opened.sequence_id, length, tokens))
    lost.end_session()
    output = await collect(call)
    assert output.text == ""
    (finished,) = output.finished
    assert finished.finish_reason == STOP
    assert fleet.num_opens() == 1


# Verifiers that are there and do not go on.


async def test_a_frozen_verifiers_requests_go_on_elsewhere(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(2, failover_after_s=1.0)
    call = fleet.running.call(1)
    lost, first = await fleet.owner()
    lost.send(lost.decided(first.sequence_id, 1, [5]))
    lost.is_frozen = True
    other, second = await fleet.owner(2)
    assert other is not lost
    # It thaws: what it still sends reaches nobody.
    lost.is_frozen = False
    await until(lambda: all(link.welcome for link in fleet.running.gateway.fleet.verifiers))
    lost.send(lost.decided(first.sequence_id, 2, [666], finish=STOP))
    lost.send(lost.decided(second.sequence_id, 2, [667], finish=STOP))

    def num_ignored(reason: str) -> float:
        return fleet.running.sample(
            "tandem_peer_messages_ignored_total", peer="verifier", reason=reason
        )

    await until(lambda: num_ignored("unknown_sequence") == num_ignored("foreign_sequence") == 1)
    other.send(other.decided(second.sequence_id, 2, [6], finish=STOP))
    output = await collect(call)
    assert output.token_ids == [5, 6]
    assert "no answer within 1 s" in [entry.get("reason") for entry in fleet.running.log]


async def test_a_stuck_engines_requests_go_on_elsewhere_and_it_gets_no_others(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(
        2, failover_after_s=1.0, draft_wait="adaptive", instance_ids=["one", "two"]
    )
    calls = [fleet.running.call(1, 2, affinity_key=f"key {index}") for index in range(8)]
    await until(lambda: fleet.num_opens() == 8)
    stuck, alive = fleet.verifiers
    num_stuck = len(stuck.commands("open"))
    assert 0 < num_stuck < 8
    # This gateway's sequences wait in a queue while others' make steps.
    alive.steps_elsewhere = True
    stuck.num_elsewhere = 1
    await until(lambda: len(alive.commands("open")) == 8)
    await until(lambda: stuck.num_ended_sessions == 1)
    reasons = [str(entry.get("reason")) for entry in fleet.running.log]
    assert any(reason.startswith("no step for") for reason in reasons)
    # Its connection lives: it is greeted again, and gets nothing until its engine steps.
    await until(lambda: stuck.num_sessions == 2)
    calls += [fleet.running.call(1, 2, affinity_key=f"other {index}") for index in range(8)]
    await until(lambda: len(alive.commands("open")) == 16)
    assert len(stuck.commands("open")) == num_stuck
    stuck.steps_elsewhere = True
    (link,) = [each for each in fleet.running.gateway.fleet.verifiers if each.name == stuck.address]
    await until(lambda: not link.load.is_unresponsive)
    live = fleet.live_ids()
    for opened in alive.commands("open"):
        if opened.sequence_id in live:
            alive.send(alive.decided(opened.sequence_id, 2, [7], finish=STOP))
    for call in calls:
        assert (await collect(call)).token_ids == [7]
    assert alive.num_sessions == 1


async def test_the_only_verifier_is_given_more_time(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(1, failover_after_s=0.1, progress_timeout_s=2.0)
    (verifier,) = fleet.verifiers
    call = fleet.running.call(1)
    await verifier.nth("open", 0)
    verifier.is_frozen = True
    (link,) = fleet.running.gateway.fleet.verifiers
    await until(lambda: link.load.is_unresponsive)
    assert verifier.num_ended_sessions == 0
    second = await verifier.nth("open", 1)
    assert "no progress within 2 s" in [entry.get("reason") for entry in fleet.running.log]
    verifier.send(verifier.decided(second.sequence_id, 1, [6], finish=STOP))
    assert (await collect(call)).token_ids == [6]


# Draining.


async def test_a_draining_verifier_gets_no_request_and_ends_those_it_has(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(2)
    calls = [fleet.running.call(1, affinity_key=f"key {index}") for index in range(4)]
    await until(lambda: fleet.num_opens() == 4)
    draining, other = fleet.verifiers
    num_before = len(draining.commands("open"))
    assert 0 < num_before < 4
    draining.send(draining.draining())
    (link,) = [
        each for each in fleet.running.gateway.fleet.verifiers if each.name == draining.address
    ]
    await until(lambda: link.is_draining)
    calls += [fleet.running.call(1, affinity_key=f"other {index}") for index in range(8)]
    await until(lambda: fleet.num_opens() == 12)
    assert len(draining.commands("open")) == num_before
    kept, *handed_over = draining.commands("open")
    draining.send(draining.decided(kept.sequence_id, 1, [5], finish=STOP))
    await until(lambda: kept.sequence_id not in fleet.live_ids())
    # It ends before the others are done.
    await draining.stop()
    await until(lambda: fleet.num_opens() == 12 + len(handed_over))
    for opened in other.commands("open"):
        other.send(
            other.opened(opened.sequence_id),
            other.decided(opened.sequence_id, 1, [5], finish=LENGTH),
        )
    for call in calls:
        assert (await collect(call)).token_ids == [5]
    assert fleet.num_resumes("verifier_draining") == len(handed_over)
    assert fleet.num_resumes("verifier_gone") == 0


def is_draining(link: VerifierLink) -> bool:
    return link.is_draining


def is_available(link: VerifierLink) -> bool:
    return link.is_available


async def test_a_rollout_of_many_verifiers_does_not_use_up_a_choices_moves(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(2, max_resumes=1)
    call = fleet.running.call(1)
    links = {link.name: link for link in fleet.running.gateway.fleet.verifiers}
    for count in range(1, 7):
        verifier, opened = await fleet.owner(count)
        verifier.send(
            verifier.opened(opened.sequence_id), verifier.decided(opened.sequence_id, count, [5])
        )
        verifier.send(verifier.draining())
        await until(functools.partial(is_draining, links[verifier.address]))
        verifier.end_session()
        await until(functools.partial(is_available, links[verifier.address]))
    # One that is lost counts.
    verifier, opened = await fleet.owner(7)
    verifier.send(verifier.opened(opened.sequence_id))
    await until(lambda: fleet.num_resumes("verifier_draining") == 6)
    await verifier.stop()
    other, opened = await fleet.owner(8)
    other.send(
        other.opened(opened.sequence_id), other.decided(opened.sequence_id, 7, [6], finish=STOP)
    )
    output = await collect(call)
    assert output.token_ids == [5] * 6 + [6]
    assert output.usage.resumes == 7


async def test_other_clients_sequences_count_as_load(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(2, failover_after_s=0.3)
    busy, idle = fleet.verifiers
    busy.num_elsewhere = 100
    busy.steps_elsewhere = True
    (link,) = [each for each in fleet.running.gateway.fleet.verifiers if each.name == busy.address]
    await until(lambda: link.load.num_others == 100)
    for verifier in fleet.verifiers:
        verifier.play(lambda opened: [5, 0])
    for index in range(8):
        await fleet.running.generate(1, affinity_key=f"key {index}")
    assert (len(busy.commands("open")), len(idle.commands("open"))) == (0, 8)
