"""The log has one line per request that sums it up, and none of its text."""

from collections.abc import Mapping

import grpc
import pytest

from tests.gateway.running_gateway import RunningGateway, StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

TIMES = {"queue_s", "first_token_s", "total_s"}


def last_lines(running: RunningGateway) -> list[Mapping[str, object]]:
    return [entry for entry in running.log if entry["event"] == "request_ended"]


async def line_of(running: RunningGateway) -> dict[str, object]:
    """The one line, without its times, which are checked."""
    await until(lambda: bool(last_lines(running)))
    (line,) = last_lines(running)
    times_s = [line[name] for name in ("queue_s", "first_token_s", "total_s") if name in line]
    assert all(isinstance(time_s, float) and time_s >= 0 for time_s in times_s)
    assert line["total_s"] == max(times_s)  # type: ignore[type-var]
    return {name: value for name, value in line.items() if name not in TIMES}


async def test_it_has_the_figures_of_the_usage(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 6, 7, 0])
    running = await start_gateway(verifiers=[verifier.address])
    output = await running.generate(1, 2, request_id="mine", n=2)
    usages = [finished.usage for finished in output.finished]
    assert await line_of(running) == {
        "event": "request_ended",
        "log_level": "info",
        "request_id": "mine",
        "tenant": "",
        "status": "OK",
        "model": verifier.model_id,
        "prompt_tokens": 2,
        "output_tokens": sum(usage.output_tokens for usage in usages),
        "cached_tokens": 0,
        "steps": sum(usage.num_steps for usage in usages),
        "drafts": sum(usage.num_drafts for usage in usages),
        "draft_tokens": sum(usage.num_draft_tokens for usage in usages),
        "accepted_tokens": sum(usage.num_accepted_tokens for usage in usages),
        "resumes": 0,
        "finish_reasons": ["stop", "stop"],
    }
    assert last_lines(running)[0].keys() >= TIMES


async def test_a_refused_request_has_one_without_what_its_client_claims(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    with pytest.raises(grpc.aio.AioRpcError):
        await running.generate(1, 2, model_id="invented")
    line = await line_of(running)
    assert line["status"] == "INVALID_ARGUMENT"
    assert "invented" not in str(line)
