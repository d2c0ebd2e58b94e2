"""Limits of tenants: shares, quotas, and what they leave to others."""

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.errors import OverloadedError
from gateway.requests.admission import Admission, AdmittedRequest
from gateway.requests.principal import ANONYMOUS, Principal
from gateway.requests.retry_hint import MAX_RETRY_AFTER_MS, RetryHint
from servicekit.errors import retry_after_ms
from tandem.v1 import gateway_pb2 as pb
from tests.gateway.clients import bearer, write_clients
from tests.gateway.running_gateway import GenerateCall, RunningGateway, StartGateway, error_of
from tests.gateway.scripted_verifier import ScriptedVerifier

A, B = Principal(tenant="a"), Principal(tenant="b")


def make_admission(*, shed: list[str] | None = None, **limits: int) -> Admission:
    return Admission(
        **{"max_choices": 10, "max_waiting_tokens": 1000, **limits},
        on_shed=(shed if shed is not None else []).append,
        clock=lambda: 0.0,
    )


def fill(admission: Admission, principal: Principal, *, num_tokens: int = 0) -> int:
    """Admits requests until one is refused; returns how many."""
    num_admitted = 0
    while True:
        try:
            admission.admit(1, principal).wait_with(num_tokens)
        except OverloadedError:
            return num_admitted
        num_admitted += 1


def test_a_greedy_tenant_leaves_room_for_others() -> None:
    shed: list[str] = []
    admission = make_admission(shed=shed)
    assert fill(admission, A) == 8
    assert shed == ["tenant_concurrency"]
    assert fill(admission, B) == 1, "it may take no more than four times what is then free"
    assert fill(admission, Principal(tenant="c")) == 1, "a tenant without any finds room"
    assert fill(admission, Principal(tenant="d")) == 0
    assert shed[1:] == ["tenant_concurrency", "concurrency", "concurrency"]


def test_a_quota_of_tokens_allows_one_request_of_any_size() -> None:
    shed: list[str] = []
    admission = make_admission(shed=shed)
    limited = Principal(tenant="a", max_waiting_tokens=50)
    first = admission.admit(1, limited)
    first.wait_with(200)
    with pytest.raises(OverloadedError, match="would exceed its limit of 50"):
        admission.admit(1, limited).wait_with(1)
    first.begin_choice()
    admission.admit(1, limited).wait_with(30)
    with pytest.raises(OverloadedError):
        admission.admit(1, limited).wait_with(21)
    assert shed == ["tenant_waiting_tokens"] * 2


def test_counts_return_to_nothing_whatever_happens() -> None:
    generator = random.Random(6)
    principals = [ANONYMOUS, A, B, Principal(tenant="c", max_choices=4, max_waiting_tokens=100)]
    admission = make_admission(max_choices=20, max_waiting_tokens=400)
    admitted: list[tuple[AdmittedRequest, list[bool]]] = []
    num_refused = 0
    for _ in range(5000):
        if admitted and generator.random() < 0.45:
            request, waiting = admitted.pop(generator.randrange(len(admitted)))
            for _ in range(generator.randint(0, len(waiting))):
                request.begin_choice()
            request.leave()
            continue
        num_choices = generator.randint(1, 4)
        try:
            request = admission.admit(
                num_choices,
                generator.choice(principals),
                model_id=generator.choice("xy"),
                has_other_models=generator.random() < 0.5,
            )
        except OverloadedError:
            num_refused += 1
            continue
        try:
            request.wait_with(generator.randint(0, 60))
            request.wait_with(generator.randint(0, 60))
        except OverloadedError:
            num_refused += 1
            request.leave()
            continue
        admitted.append((request, [True] * num_choices))
    assert num_refused > 100
    assert admitted
    with pytest.raises(AssertionError):
        admission.check_idle()
    for request, _ in admitted:
        request.leave()
    admission.check_idle()


def test_the_retry_hint_grows_with_refusals_and_shrinks_when_requests_are_served() -> None:
    now_s = [0.0]
    hint = RetryHint(lambda: now_s[0])
    assert hint.refuse() == 1000
    assert [hint.refuse() for _ in range(3)] == [2000, 3000, 4000]
    for _ in range(3):
        hint.count_served()
    assert hint.refuse() == 2000, "four refused, four to be served"
    for _ in range(1000):
        hint.refuse()
    assert hint.refuse() == MAX_RETRY_AFTER_MS
    now_s[0] += 300.0
    assert hint.refuse() == 1000, "old refusals do not count"
    for _ in range(1000):
        hint.count_served()
    now_s[0] += 300.0
    assert [hint.refuse() for _ in range(2)] == [1000, 2000], "nor do old services"


def call_as(running: RunningGateway, token: str, **fields: Any) -> GenerateCall:
    request = pb.GenerateRequest(tokens=pb.TokenIds(token_ids=[1]), **fields)
    return running.stub.Generate(request, metadata=bearer(token))


@pytest.mark.stand_in
async def test_a_greedy_tenant_is_refused_at_once_while_another_is_served(
    start_gateway: StartGateway, verifier: ScriptedVerifier, tmp_path: Path
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address],
        max_concurrent_requests=10,
        clients=write_clients(
            tmp_path / "clients.yaml",
            greedy={"tokens": ["greedy"]},
            modest={"tokens": ["modest"]},
            small={"tokens": ["small"], "max_concurrent_requests": 1},
        ),
    )
    held = [call_as(running, "greedy") for _ in range(8)]
    await verifier.nth("open", 7)
    for _ in range(16):
        error = await error_of(call_as(running, "greedy"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (retry_after_ms(error) or 0) >= 1000
    assert running.sample("tandem_requests_shed_total", reason="tenant_concurrency") == 16
    held.append(call_as(running, "modest"))
    held.append(call_as(running, "small"))
    await verifier.nth("open", 9)
    held.pop(0).cancel()
    await verifier.nth("close", 0)
    error = await error_of(call_as(running, "small"))
    assert "at most 1 choices" in (error.details() or "")
    for call in held:
        call.cancel()
