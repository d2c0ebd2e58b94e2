"""A verifier that is full or cannot run a request: another one does, or the client is told."""

import grpc
import pytest

from servicekit.errors import retry_after_ms
from tests.gateway.conftest import StartVerifier
from tests.gateway.fleet import StartFleet, call_with_output
from tests.gateway.running_gateway import (
    StartGateway,
    collect,
    error_of,
    until,
)
from tests.gateway.scripted_verifier import STOP

pytestmark = pytest.mark.stand_in

INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 3, 8, 12, 13, 14


@pytest.mark.parametrize(
    ("code", "reason"), [(RESOURCE_EXHAUSTED, "full"), (UNAVAILABLE, "draining")]
)
async def test_a_refused_request_goes_to_another_verifier(
    start_fleet: StartFleet, code: int, reason: str
) -> None:
    fleet = await start_fleet(2)
    call = fleet.running.call(1)
    full, first = await fleet.owner()
    full.send(full.rejected(first.sequence_id, code=code, message="no", retry_after_ms=60_000))
    other, second = await fleet.owner(2)
    assert other is not full
    other.send(other.decided(second.sequence_id, 1, [6], finish=STOP))
    output = await collect(call)
    assert output.token_ids == [6]
    assert output.usage.resumes == 0
    assert fleet.running.sample("tandem_request_retries_total", reason=reason) == 1
    assert fleet.running.sample("tandem_requests_shed_total") == 0
    # Until it takes sequences again, it is asked last.
    other.play(lambda opened: [5, 0])
    for index in range(8):
        await fleet.running.generate(1, affinity_key=f"key {index}")
    assert len(full.commands("open")) == 1


@pytest.mark.parametrize(("asked_ms", "told_ms"), [(700, 700), (2**32 - 1, 30_000)])
async def test_if_all_refuse_the_client_gets_the_last_refusal(
    start_fleet: StartFleet, asked_ms: int, told_ms: int
) -> None:
    fleet = await start_fleet(2)
    call = fleet.running.call(1)
    for count in (1, 2):
        verifier, opened = await fleet.owner(count)
        verifier.send(
            verifier.rejected(
                opened.sequence_id, code=RESOURCE_EXHAUSTED, message="full", retry_after_ms=asked_ms
            )
        )
    error = await error_of(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert retry_after_ms(error) == told_ms


async def test_every_fifth_refused_request_goes_to_another_verifier_once_many_were_refused(
    start_fleet: StartFleet,
) -> None:
    """Where all are full, each offer only adds to the load."""
    fleet = await start_fleet(2)
    fleet.running.gateway.coordinator._failover.retries._num_left["scripted"] = -0.1
    for count in range(1, 7):
        call = fleet.running.call(1)
        full, opened = await fleet.owner(count)
        full.send(
            full.rejected(
                opened.sequence_id, code=RESOURCE_EXHAUSTED, message="full", retry_after_ms=1
            )
        )
        if count < 6:
            assert (await error_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other, _ = await fleet.owner(7)
    assert other is not full
    call.cancel()


async def test_refusals_do_not_use_up_a_displaced_choices_moves(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(3, max_resumes=1)
    call, lost = await call_with_output(fleet)
    await lost.stop()
    others = fleet.others(lost)
    for count in range(2, 6):
        full, opened = await fleet.owner(count)
        assert full in others
        full.send(
            full.rejected(
                opened.sequence_id, code=RESOURCE_EXHAUSTED, message="full", retry_after_ms=50
            )
        )
    taker, opened = await fleet.owner(6)
    taker.send(
        taker.opened(opened.sequence_id), taker.decided(opened.sequence_id, 2, [6], finish=STOP)
    )
    output = await collect(call)
    assert output.token_ids == [6]
    assert output.usage.resumes == 1
    assert fleet.num_resumes("verifier_gone") == 1


@pytest.mark.parametrize("code", [INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL])
async def test_a_verifier_that_cannot_run_what_another_ran_is_passed_over(
    start_fleet: StartFleet, code: int
) -> None:
    fleet = await start_fleet(3)
    call, lost = await call_with_output(fleet)
    await lost.stop()
    unable, second = await fleet.owner(2)
    unable.send(unable.rejected(second.sequence_id, code=code, message="not on this server"))
    other, third = await fleet.owner(3)
    assert other is not unable
    other.send(
        other.opened(third.sequence_id), other.decided(third.sequence_id, 2, [6], finish=STOP)
    )
    output = await collect(call)
    assert output.token_ids == [6]
    assert output.usage.resumes == 1
    details = [e["detail"] for e in fleet.running.log if e["event"] == "peer_message_ignored"]
    assert details == ["not on this server"]


async def test_a_verifier_with_a_smaller_limit_does_not_cut_an_output_short(
    start_gateway: StartGateway, start_verifier: StartVerifier, unused_tcp_port: int
) -> None:
    lost = await start_verifier(max_model_len=64)
    address = f"127.0.0.1:{unused_tcp_port}"
    running = await start_gateway(verifiers=[lost.address, address], resume_timeout_s=1.0)
    longest = running.call(1, 2)
    shorter = running.call(1, 2, max_new_tokens=30)
    for index in range(2):
        opened = await lost.nth("open", index)
        lost.send(lost.opened(opened.sequence_id), lost.decided(opened.sequence_id, 2, [5]))
    small = await start_verifier(listen=address, max_model_len=32)
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    small.play(lambda opened: [6] * 99)
    await lost.stop()
    # The client is told so, and may ask for less.
    assert (await error_of(longest)).code() is grpc.StatusCode.UNAVAILABLE
    assert (await collect(shorter)).token_ids == [5, *[6] * 29]
    (opened,) = small.commands("open")
    assert opened.max_new_tokens == 30
