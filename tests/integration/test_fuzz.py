"""Hostile input (docs/acceptance.md): every input is answered cleanly and affects nobody else."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from benchmarks.services import ServiceError
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2, verifier_pb2
from tests.fuzz.answers import AnswerError, check_answers
from tests.fuzz.calls import find_methods
from tests.fuzz.campaign import Report, run_campaign
from tests.fuzz.services import running_services

OURS = {
    f"/{service.full_name}/{method.name}"
    for module in (drafter_pb2, gateway_pb2, verifier_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


async def fuzz(folder: Path, *, num_inputs: int, seed: int) -> Report:
    with running_services(folder) as services:
        found = {method.path for method in find_methods(services)}
        report = await run_campaign(services, num_inputs=num_inputs, seed=seed)
    assert found >= OURS
    assert "/grpc.health.v1.Health/Check" in found
    assert report.failures == []
    assert report.num_inputs >= num_inputs
    assert report.num_bystander_requests > 0
    return report


async def test_hundreds_of_inputs_are_answered_and_change_no_other_output(tmp_path: Path) -> None:
    report = await fuzz(tmp_path, num_inputs=600, seed=1)
    # Every method got inputs and answered some of them.
    for path in OURS:
        name = path.rpartition(".")[2]
        codes = {
            code for (method, code), _ in report.statuses.items() if method.endswith(f" {name}")
        }
        assert codes - {"CANCELLED"}, f"{path} was never answered"


async def test_one_call_is_sent_alone_and_a_service_that_dies_is_reported(tmp_path: Path) -> None:
    with contextlib.suppress(ServiceError), running_services(tmp_path) as services:
        alone = await run_campaign(services, num_inputs=1, seed=1, first_call=500)
        (drafter,) = (service for service in services if service.name == "drafter")
        campaign = asyncio.create_task(run_campaign(services, num_inputs=10**6, seed=1))
        await asyncio.sleep(1)
        drafter.kill()
        report = await campaign
    assert sum(alone.statuses.values()) == 1
    assert any(failure.startswith("drafter died: -9") for failure in report.failures)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
async def test_many_inputs_are_answered_and_change_no_other_output(
    tmp_path: Path, seed: int
) -> None:
    await fuzz(tmp_path, num_inputs=20_000, seed=seed)


Response = gateway_pb2.GenerateResponse
Chunk, Finished = gateway_pb2.Chunk, gateway_pb2.Finished
GENERATE = "/tandem.v1.GenerationService/Generate"
STARTED = Response(started=gateway_pb2.Started())
ENDED = Finished(
    finish_reason=sampling_pb2.FINISH_REASON_LENGTH, usage=gateway_pb2.Usage(output_tokens=1)
)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([Response(chunk=Chunk(token_ids=[1]))], "no Started"),
        ([STARTED, Response(chunk=Chunk(offset=1, token_ids=[1]))], "offset 1"),
        ([STARTED, Response(finished=ENDED)], "usage"),
        ([STARTED, Response(chunk=Chunk(token_ids=[1]))], "0 of 1 finished"),
        (
            [
                STARTED,
                Response(chunk=Chunk(token_ids=[1])),
                Response(finished=ENDED),
                Response(chunk=Chunk(token_ids=[1], offset=1)),
            ],
            "after its end",
        ),
    ],
)
def test_answers_that_break_the_contract_are_detected(
    answers: list[Response], problem: str
) -> None:
    with pytest.raises(AnswerError, match=problem):
        check_answers(GENERATE, [gateway_pb2.GenerateRequest()], answers, is_complete=True)


def test_an_event_after_a_sequences_end_is_detected() -> None:
    request = verifier_pb2.SessionRequest()
    request.commands.add().open.sequence_id = "a"
    welcome, ended = verifier_pb2.SessionResponse(), verifier_pb2.SessionResponse()
    welcome.events.add().welcome.SetInParent()
    rejected = ended.events.add().rejected
    rejected.sequence_id, rejected.code, rejected.message = "a", 3, "no"
    path = "/tandem.v1.VerifierService/Session"
    check_answers(path, [request], [welcome, ended], is_complete=True)
    with pytest.raises(AnswerError, match="after the end"):
        check_answers(path, [request], [welcome, ended, ended], is_complete=True)
