"""Deadlines that pass while a request waits, is prefilled or is generated."""

import pytest

from tandem.v1 import gateway_pb2 as pb
from tests.gateway.running_gateway import RunningGateway, StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

PHASES = ("queue", "prefill", "decode")
LABELS = {"service": "tandem.v1.GenerationService", "method": "Generate"}


def expired(running: RunningGateway) -> dict[str, float]:
    return {phase: running.sample("tandem_requests_expired_total", phase=phase) for phase in PHASES}


@pytest.mark.parametrize("phase", PHASES)
async def test_an_expired_request_is_freed_and_counted_by_phase(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A client ends a call at its deadline by a cancel, which overtakes the server's own clock. Here
    # it does so long before, so that no slow machine comes first.
    monkeypatch.setattr("servicekit.interceptors.base._CLIENT_LEAD_S", 3600.0)
    running = await start_gateway(verifiers=[verifier.address])
    request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]), n=2)
    call = running.stub.Generate(request, timeout=3600.0)
    opened = [await verifier.nth("open", index) for index in range(2)]
    if phase != "queue":
        # One of the two suffices.
        verifier.send(verifier.opened(opened[1].sequence_id))
    if phase == "decode":
        verifier.send(verifier.decided(opened[1].sequence_id, 1, [5]))
        async for event in call:
            if event.HasField("chunk"):
                break
    elif phase == "prefill":
        await until(lambda: running.sample("tandem_num_requests_running") == 1)
    call.cancel()
    closed = {(await verifier.nth("close", index)).sequence_id for index in range(2)}
    assert closed == {each.sequence_id for each in opened}
    await running.until_idle()
    await until(lambda: sum(expired(running).values()) > 0)
    assert expired(running) == {each: float(each == phase) for each in PHASES}
    assert running.sample("tandem_request_errors_total", code="DEADLINE_EXCEEDED") == 1
    await until(
        lambda: running.sample("tandem_rpc_requests_total", code="DEADLINE_EXCEEDED", **LABELS) == 1
    )


@pytest.mark.parametrize("timeout_s", [None, 3600.0])
async def test_a_client_that_cancels_before_its_deadline_is_not_counted(
    start_gateway: StartGateway, verifier: ScriptedVerifier, timeout_s: float | None
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]))
    call = running.stub.Generate(request, timeout=timeout_s)
    await verifier.nth("open", 0)
    call.cancel()
    await verifier.nth("close", 0)
    await running.until_idle()
    assert sum(expired(running).values()) == 0
    await until(
        lambda: running.sample("tandem_rpc_requests_total", code="CANCELLED", **LABELS) == 1
    )
    assert running.sample("tandem_request_errors_total", code="DEADLINE_EXCEEDED") == 0
