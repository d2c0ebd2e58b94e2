"""A request runs on one model, from its first check to its last token."""

import grpc
import pytest

from servicekit.errors import field_violation, retry_after_ms
from tandem.v1 import gateway_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.openai.clients import post
from tests.gateway.running_gateway import RunningGateway, StartGateway, error_of, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in


async def start_three(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> tuple[RunningGateway, list[ScriptedVerifier]]:
    """The first of three verifiers has other weights, and a higher limit on lengths."""
    verifiers = [await start_verifier(max_model_len=length) for length in (4000, 3000, 2000)]
    for verifier, digest in zip(verifiers, ("old", "new", "new"), strict=True):
        verifier.model_digest = digest
        verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address for verifier in verifiers])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    return running, verifiers


async def served(running: RunningGateway) -> list[tuple[str, str, int, int]]:
    response = await running.stub.ListModels(gateway_pb2.ListModelsRequest())
    return [
        (model.model_id, model.model_digest, model.num_verifiers, model.max_model_len)
        for model in response.models
    ]


async def test_the_digest_with_more_verifiers_gets_the_requests(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    running, verifiers = await start_three(start_gateway, start_verifier)
    # Restarted with other weights.
    verifiers[2].model_digest = "old"
    verifiers[2].end_session()
    await until(lambda: verifiers[2].num_sessions == 2)
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    assert await served(running) == [("scripted", "old", 2, 2000)]
    num_before = len(verifiers[1].commands("open"))
    for index in range(12):
        await running.generate(1, affinity_key=f"key {index}")
    assert len(verifiers[1].commands("open")) == num_before
    assert running.sample("tandem_verifiers_outvoted") == 1


async def test_a_request_that_expects_a_model_gets_that_one_or_none(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    running, verifiers = await start_three(start_gateway, start_verifier)
    for expected in ("old", "new"):
        output = await running.generate(1, expected_model_digest=expected)
        assert output.started is not None
        assert output.started.model_digest == expected
    (opened,) = verifiers[0].commands("open")
    assert opened.expected_model_digest == "old"
    error = await error_of(running.call(1, expected_model_digest="older"))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert field_violation(error) == (
        "expected_model_digest",
        "no verifier serves the model older",
    )


async def test_a_model_whose_verifiers_are_gone_is_unavailable_and_not_unknown(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier() for _ in range(2)]
    for verifier, model_id in zip(verifiers, ("first", "second"), strict=True):
        verifier.model_id = verifier.model_digest = model_id
    running = await start_gateway(
        verifiers=[verifier.address for verifier in verifiers], http_listen="127.0.0.1:0"
    )
    links = running.gateway.fleet.verifiers
    await until(lambda: all(link.welcome for link in links))
    verifiers[0].send(verifiers[0].draining())
    await until(lambda: links[0].is_draining)
    for fields in ({}, {"expected_model_digest": "first"}):
        error = await error_of(running.call(1, model_id="first", **fields))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error)
    answer = await post(running, "/v1/completions", {"model": "first", "prompt": [1]})
    assert answer.status == 503
    error = await error_of(running.call(1, model_id="third"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    verifiers[0].end_session()
    verifiers[0].play(lambda opened: [5, 0])
    await until(lambda: links[0].is_available)
    assert (await running.generate(1, model_id="first")).token_ids == [5, 0]
    error = await error_of(running.call(1, model_id="second", expected_model_digest="first"))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, "it is another model's digest"


async def test_a_model_is_traced_only_where_each_of_its_verifiers_allows_it(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier() for _ in range(3)]
    for verifier, model_id in zip(verifiers, ("all", "some", "some"), strict=True):
        verifier.model_id = model_id
    verifiers[2].allows_trace = False
    running = await start_gateway(verifiers=[verifier.address for verifier in verifiers])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    models = running.gateway.fleet.models()
    assert {name: model.allows_trace for name, model in models.items()} == {
        "all": True,
        "some": False,
    }
