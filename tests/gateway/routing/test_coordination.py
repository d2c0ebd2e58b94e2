"""From a request to its Open, which names a drafter, and from a step to the client's chunks."""

import asyncio

import pytest

from gateway.routing.router import choose_drafter
from tandem.v1 import drafter_pb2, sampling_pb2, verifier_pb2
from tests.gateway.running_gateway import StartGateway, until
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

DRAFTERS = [f"10.0.0.{index}:50051" for index in range(4)]


async def test_an_open_says_who_drafts_and_how(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=["10.0.0.9:50051"], hint_tokens=24
    )
    call = running.call(
        5,
        6,
        7,
        sampling=sampling_pb2.SamplingParams(temperature=1, seed=3),
        speculation=sampling_pb2.SpeculationParams(pool="p"),
    )
    opened = await verifier.nth("open", 0)
    assert len(opened.sequence_id) == 32
    opened.sequence_id = ""
    assert opened == verifier_pb2.Open(
        token_ids=[5, 6, 7],
        prompt_length=3,
        sampling=sampling_pb2.SamplingParams(temperature=1, seed=3),
        max_new_tokens=2045,
        draft_wait=verifier_pb2.DRAFT_WAIT_ALWAYS,
        drafting=True,
        num_speculative_tokens=7,
        cache_salt="0:/",
        expected_model_digest="digest",
        drafter_address="10.0.0.9:50051",
        tokens_per_match=2,
        ngram=drafter_pb2.NgramParams(
            min_ngram=1,
            max_ngram=5,
            overlap=drafter_pb2.OVERLAP_DISJOINT,
            tie=drafter_pb2.TIE_LONGEST,
            # Drafters run ahead of the verifier's steps.
            tokens_per_match=8,
            algorithm=drafter_pb2.ALGORITHM_INDEX,
            pool_id="0:/p",
        ),
        hint_tokens=24,
        keep=drafter_pb2.KEEP_OUTPUT,
    )
    call.cancel()


async def test_a_verifiers_sequences_have_one_drafter_whatever_their_pools(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address], drafters=DRAFTERS)
    for pool in ("one", "two", ""):
        speculation = sampling_pb2.SpeculationParams(pool=pool)
        await asyncio.gather(*(running.generate(1, n=8, speculation=speculation) for _ in range(8)))
    used: dict[str, set[str]] = {}
    for opened in verifier.commands("open"):
        used.setdefault(opened.ngram.pool_id, set()).add(opened.drafter_address)
    assert used == {
        pool_id: {choose_drafter(verifier.address, DRAFTERS)}
        for pool_id in ("0:/one", "0:/two", "")
    }


async def test_two_gateways_at_one_verifier_get_the_tokens_of_their_own_sequences(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [opened.token_ids[0] + 1, 9])
    first, second = [await start_gateway(verifiers=[verifier.address]) for _ in range(2)]
    outputs = await asyncio.gather(first.generate(10), second.generate(20))
    assert [output.token_ids for output in outputs] == [[11, 9], [21, 9]]
    assert verifier.num_sessions == 2
    await first.gateway.stop()
    await until(lambda: verifier.num_ended_sessions == 1)
    assert (await second.generate(30)).token_ids == [31, 9]


async def test_the_round_trips_that_verifiers_report_are_observed(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    for round_trip_s in (0.25, 0.0, -1.0, float("nan"), float("inf"), 1e9, 0.5):
        step = verifier_pb2.StepStats(draft_round_trip_s=round_trip_s)
        verifier.send_response(verifier_pb2.SessionResponse(step=step))
    name = "tandem_draft_round_trip_seconds"
    await until(lambda: running.sample(f"{name}_count") == 2)
    assert running.sample(f"{name}_sum") == 0.75
