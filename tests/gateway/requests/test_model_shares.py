"""What an overloaded model leaves to the other models of its gateway."""

import grpc
import pytest

from gateway.errors import OverloadedError
from gateway.requests.admission import Admission
from gateway.requests.principal import Principal
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import StartGateway, error_of, until


def fill(
    admission: Admission, model_id: str, *, num_tokens: int = 0, has_other_models: bool = True
) -> int:
    """Admits requests for a model until one is refused; returns how many."""
    num_admitted = 0
    while True:
        try:
            request = admission.admit(
                1, Principal(), model_id=model_id, has_other_models=has_other_models
            )
            request.wait_with(num_tokens)
        except OverloadedError:
            return num_admitted
        num_admitted += 1


@pytest.mark.parametrize(("num_tokens", "reason"), [(0, "concurrency"), (100, "waiting_tokens")])
def test_a_model_leaves_room_for_the_others(num_tokens: int, reason: str) -> None:
    """Four fifths are its share, of choices and of tokens that wait."""
    shed: list[str] = []
    admission = Admission(
        max_choices=100 if num_tokens else 10,
        max_waiting_tokens=1000,
        on_shed=shed.append,
        clock=lambda: 0.0,
    )
    assert fill(admission, "busy", num_tokens=num_tokens) == 8
    assert fill(admission, "busy", num_tokens=num_tokens, has_other_models=False) == 2
    assert shed == [f"model_{reason}", reason]


@pytest.mark.stand_in
async def test_requests_for_a_model_find_room_while_another_model_is_overloaded(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier() for _ in range(2)]
    for verifier, model_id in zip(verifiers, ("busy", "calm"), strict=True):
        verifier.model_id = verifier.model_digest = model_id
    verifiers[1].play(lambda opened: [5, 0])
    running = await start_gateway(
        verifiers=[verifier.address for verifier in verifiers], max_concurrent_requests=10
    )
    links = running.gateway.fleet.verifiers
    await until(lambda: all(link.welcome for link in links))
    held = [running.call(1, model_id="busy") for _ in range(8)]
    await verifiers[0].nth("open", 7)
    error = await error_of(running.call(1, model_id="busy"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert running.sample("tandem_requests_shed_total", reason="model_concurrency") == 1
    assert (await running.generate(1, model_id="calm")).token_ids == [5, 0]
    # While the other model's verifier restarts, its room is kept.
    verifiers[1].send(verifiers[1].draining())
    await until(lambda: links[1].is_draining)
    error = await error_of(running.call(1, model_id="busy"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in held:
        call.cancel()
