"""`report_tokens` through a whole gateway: each token's text, over gRPC and as HTTP tells it."""

import grpc
import pytest

from gateway.text.detokenizer import REPLACEMENT
from gateway.text.tokenizer import Tokenizer
from servicekit.errors import field_violation
from tandem.v1 import sampling_pb2
from tests.gateway.openai.clients import post
from tests.gateway.openai.conftest import StartApi
from tests.gateway.openai.test_report import reports
from tests.gateway.running_gateway import Output, StartGateway, error_of
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

# Repeats itself, so that drafts are accepted; each emoji is several tokens.
TEXT = "né 日本 \N{GRINNING FACE} né 日本 \N{GRINNING FACE} né 日本 \N{GRINNING FACE} end"


def told(output: Output) -> list[tuple[str, bool]]:
    """The reported tokens; each chunk's fit its text, its tokens and its accepted drafts."""
    for chunk in output.chunks:
        tokens = chunk.reported_tokens
        assert "".join(token.text for token in tokens) == chunk.text
        assert len(tokens) == len(chunk.token_ids)
        assert sum(token.accepted for token in tokens) == chunk.num_accepted_tokens
    return [
        (token.text, token.accepted) for chunk in output.chunks for token in chunk.reported_tokens
    ]


@pytest.mark.parametrize("stop_sequences", [[], ["e", "never"], ["\N{GRINNING FACE} né 日x"]])
async def test_reports_change_nothing_else(
    start_api: StartApi, verifier: ScriptedVerifier, tokenizer: Tokenizer, stop_sequences: list[str]
) -> None:
    verifier.play(lambda opened: [*tokenizer.encode(TEXT), 0])
    running = await start_api(drafters=["127.0.0.1:1"])
    fields = {"stop_sequences": stop_sequences, "speculation": {"enabled": True}}
    output = await running.generate(5, 6, report_tokens=True, **fields)
    plain = await running.generate(5, 6, **fields)
    assert (output.text, output.token_ids) == (plain.text, plain.token_ids)
    assert output.text == TEXT.partition("e")[0] if "e" in stop_sequences else TEXT
    texts = told(output)
    assert not any(REPLACEMENT in text for text, _ in texts)
    assert not any(chunk.reported_tokens for chunk in plain.chunks)
    assert {accepted for _, accepted in texts} == {True, False}


@pytest.mark.parametrize("stop", [[], ["e", "never"], ["\N{GRINNING FACE} né 日x"]])
async def test_http_tells_the_same_texts_of_tokens(
    start_api: StartApi, verifier: ScriptedVerifier, tokenizer: Tokenizer, stop: list[str]
) -> None:
    verifier.play(lambda opened: [*tokenizer.encode(TEXT), 0])
    running = await start_api(drafters=["127.0.0.1:1"])
    output = await running.generate(5, 6, report_tokens=True, stop_sequences=stop)
    answer = await post(
        running,
        "/v1/completions",
        {
            "model": "scripted",
            "prompt": [5, 6],
            "stream": True,
            "max_tokens": 500,
            "stop": stop,
            "speculation": {"report": True},
        },
    )
    text = "".join(chunk["choices"][0]["text"] for chunk in answer.events[:-1])
    assert text == output.text
    tokens = [token for report in reports(answer) for token in report["tokens"]]
    assert [(token["text"], token["accepted"]) for token in tokens] == told(output)
    assert [token["id"] for token in tokens] == output.token_ids


async def test_without_the_models_tokenizer_http_tells_ids_alone(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 6, 0])
    running = await start_gateway(verifiers=[verifier.address], http_listen="127.0.0.1:0")
    body = {"model": "scripted", "prompt": [1], "stream": True, "speculation": {"report": True}}
    answer = await post(running, "/v1/completions", body)
    tokens = [token for report in reports(answer) for token in report["tokens"]]
    assert [(token["id"], token["text"]) for token in tokens] == [(5, ""), (6, ""), (0, "")]


async def test_each_choice_has_its_own(
    start_api: StartApi, verifier: ScriptedVerifier, tokenizer: Tokenizer
) -> None:
    verifier.play(lambda opened: [*tokenizer.encode(f"日{opened.sampling.seed}"), 0])
    running = await start_api()
    output = await running.generate(
        5, report_tokens=True, n=2, sampling=sampling_pb2.SamplingParams(temperature=1, seed=3)
    )
    for index in range(2):
        choice = output.of(index)
        assert "".join(text for text, _ in told(choice)) == choice.text
        assert choice.text.startswith("日")


async def test_a_gateway_without_a_tokenizer_refuses_it(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    error = await error_of(running.call(5, 6, report_tokens=True))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (field_violation(error) or ("", ""))[0] == "report_tokens"
