"""A request runs on one model, from its first check to its last token."""

import hashlib
from pathlib import Path

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


async def test_two_models_of_one_name_are_not_one_model(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    running, verifiers = await start_three(start_gateway, start_verifier)
    assert await served(running) == [("scripted", "new", 2, 2000)]
    for index in range(12):
        await running.generate(1, affinity_key=f"key {index}")
    opened = [verifier.commands("open") for verifier in verifiers]
    assert not opened[0], "requests go to the model with more verifiers"
    assert all(opened[1:])
    assert {each.expected_model_digest for each in opened[1] + opened[2]} == {"new"}
    assert running.sample("tandem_verifiers_outvoted") == 1
    assert [e["event"] for e in running.log].count("model_digests_differ") >= 1


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


async def test_a_verifier_that_serves_another_model_refuses_by_field(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1)
    opened = await verifier.nth("open", 0)
    assert opened.expected_model_digest == "digest"
    verifier.send(
        verifier.rejected(
            opened.sequence_id, code=9, message="another", field="expected_model_digest"
        )
    )
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert field_violation(error) == ("model_id", "another")


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


async def test_text_for_a_model_of_another_tokenizer_is_refused_and_token_ids_are_not(
    start_gateway: StartGateway, start_verifier: StartVerifier, model_folder: Path
) -> None:
    own = hashlib.sha256((model_folder / "tokenizer.json").read_bytes()).hexdigest()
    verifiers = [await start_verifier() for _ in range(3)]
    for index, (verifier, digest) in enumerate(zip(verifiers, (own, "0" * 64, ""), strict=True)):
        verifier.model_id = f"model-{index}"
        verifier.tokenizer_digest = digest
        verifier.play(lambda opened: [70, 71, 0])
    running = await start_gateway(
        verifiers=[verifier.address for verifier in verifiers], tokenizer=model_folder
    )
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    for model_id in ("model-0", "model-2"):
        output = await running.generate(text="abc", model_id=model_id)
        assert output.text
    for fields, name in (
        ({"text": "abc"}, "text"),
        (
            {"tokens": gateway_pb2.TokenIds(token_ids=[1]), "stop_sequences": ["x"]},
            "stop_sequences",
        ),
        (
            {"tokens": gateway_pb2.TokenIds(token_ids=[1]), "report_tokens": True},
            "report_tokens",
        ),
    ):
        error = await error_of(running.call(model_id="model-1", **fields))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        violation = field_violation(error)
        assert violation is not None
        assert violation[0] == name
        assert "model-1" in violation[1]
    output = await running.generate(1, model_id="model-1")
    assert output.token_ids == [70, 71, 0]
    assert output.text == "", "the tokenizer is another model's"
