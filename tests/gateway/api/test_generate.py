"""Generate over real sockets: text, ends, choices, resumption, cancels, and counts."""

import asyncio
from pathlib import Path

import pytest

from gateway.requests.seeds import seed_of_choice
from gateway.text.tokenizer import Tokenizer
from tandem.v1 import gateway_pb2, sampling_pb2
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import (
    Output,
    RunningGateway,
    StartGateway,
    add,
    collect,
    read,
    until,
)
from tests.gateway.scripted_verifier import CANCELLED, LENGTH, STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in


async def test_a_stop_string_ends_the_output_and_the_sequence(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    model_folder: Path,
    tokenizer: Tokenizer,
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    ids = [tokenizer.encode(character)[0] for character in "abSTOPcdef"]
    call = running.call(9, stop_sequences=["STOP", "never"])
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.decided(opened.sequence_id, 1, ids[:4]))
    output = Output()
    add(output, await read(call))
    add(output, await read(call))
    assert output.text == "ab", "ST may become the stop string"
    verifier.send(verifier.decided(opened.sequence_id, 5, ids[4:9], drafts=7, accepted=4))
    close = await verifier.nth("close", 0)
    assert close.sequence_id == opened.sequence_id
    # The verifier had run ahead; its later events are ignored.
    verifier.send(verifier.decided(opened.sequence_id, 10, ids[9:]))
    verifier.send(verifier.decided(opened.sequence_id, 11, [], finish=CANCELLED))
    rest = await collect(call)
    assert rest.text == ""
    assert output.token_ids + rest.token_ids == ids[:6], "the completing token, and none after it"
    assert rest.finished[0].finish_reason == STOP
    usage = rest.usage
    assert (usage.output_tokens, usage.num_steps) == (6, 2)
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (7, 2)
    assert running.sample("tandem_generation_tokens_total") == 6
    assert running.sample("tandem_spec_decode_num_accepted_tokens_total") == 2
    assert running.sample("tandem_request_success_total", finish_reason="stop") == 1


async def test_each_choice_is_a_sequence_with_its_own_seed(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [opened.sampling.seed % 1000 + 5] * 3)
    running = await start_gateway(verifiers=[verifier.address])
    output = await running.generate(
        1, 2, n=3, sampling=sampling_pb2.SamplingParams(temperature=1, seed=42)
    )
    assert output.started is not None
    assert output.started.seed == 42
    seeds = [seed_of_choice(42, index) for index in range(3)]
    assert [opened.sampling.seed for opened in verifier.commands("open")] == seeds
    assert len({opened.sequence_id for opened in verifier.commands("open")}) == 3
    for index in range(3):
        choice = output.of(index)
        assert choice.token_ids == [seeds[index] % 1000 + 5] * 3
        assert choice.finished[0].finish_reason == STOP
        assert choice.usage.prompt_tokens == 2
    assert running.sample("tandem_request_success_total", finish_reason="stop") == 3
    assert running.sample("tandem_prompt_tokens_total") == 6


@pytest.mark.parametrize("num_given", [1, 2, 5, 9])
async def test_a_resumed_stream_and_the_first_part_make_the_whole(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    model_folder: Path,
    tokenizer: Tokenizer,
    num_given: int,
) -> None:
    """The cut may be within a character or a possible stop string."""
    whole = [*tokenizer.encode("x STO\N{GRINNING FACE} STOPPED end"), 0]

    running = await start_gateway(verifiers=[verifier.address], tokenizer=model_folder)
    outputs: list[Output] = []
    for given in ([], whole[:num_given]):
        call = running.call(
            3, 4, output_token_ids=given, stop_sequences=["STOPPED!"], max_new_tokens=40
        )
        output = Output()
        add(output, await read(call))
        opened = await verifier.nth("open", len(outputs))
        assert list(opened.token_ids) == [3, 4, *given]
        assert (opened.prompt_length, opened.max_new_tokens) == (2, 40)
        for index in range(len(given), len(whole)):
            finish = STOP if index == len(whole) - 1 else 0
            token_ids = whole[index : index + 1]
            verifier.send(verifier.decided(opened.sequence_id, 2 + index, token_ids, finish=finish))
            add(output, await read(call))
        add(output, await read(call))
        outputs.append(output)
    uninterrupted, resumed = outputs
    assert uninterrupted.text == "x STO\N{GRINNING FACE} STOPPED end"
    first = uninterrupted.chunks[:num_given]
    assert [chunk.offset for chunk in resumed.chunks] == list(range(num_given, len(whole)))
    assert resumed.token_ids == whole[num_given:]
    assert "".join(chunk.text for chunk in first) + resumed.text == uninterrupted.text
    assert resumed.usage.prompt_tokens == 2
    assert resumed.usage.output_tokens == len(whole)
    generated = running.sample("tandem_generation_tokens_total")
    assert generated == 2 * len(whole) - num_given


async def test_a_client_that_reads_slowly_gets_its_steps_merged(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    """The client reads nothing for a while: the transport fills up, then the chunk grows."""
    verifier = await start_verifier(max_model_len=100_000)
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1)
    opened = await verifier.nth("open", 0)
    num_steps = 20_000
    for start in range(0, num_steps, 100):
        verifier.send(
            *(
                verifier.decided(
                    opened.sequence_id,
                    1 + step,
                    [step % 2000],
                    finish=LENGTH if step == num_steps - 1 else 0,
                )
                for step in range(start, start + 100)
            )
        )
    await until(lambda: not running.gateway.coordinator._sequences._by_id)
    output = await collect(call)
    assert output.token_ids == [step % 2000 for step in range(num_steps)]
    assert len(output.chunks) < num_steps / 50
    assert sum(chunk.num_steps for chunk in output.chunks) == num_steps
    assert output.usage.num_steps == num_steps


async def test_the_metrics_equal_the_sums_of_usage(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: [*opened.token_ids, *reversed(opened.token_ids), 0])
    running = await start_gateway(verifiers=[verifier.address], drafters=["10.0.0.9:50051"])
    outputs = await asyncio.gather(
        *(
            running.generate(
                *range(10, 40),
                100 + index,
                n=1 + index % 2,
                max_new_tokens=20 + 10 * index,
                speculation=sampling_pb2.SpeculationParams(num_speculative_tokens=index % 8),
            )
            for index in range(12)
        )
    )
    usages = [finished.usage for output in outputs for finished in output.finished]
    assert len(usages) == 18
    for metric, field in (
        ("tandem_generation_steps", "num_steps"),
        ("tandem_spec_decode_num_drafts", "num_drafts"),
        ("tandem_spec_decode_num_draft_tokens", "num_draft_tokens"),
        ("tandem_spec_decode_num_accepted_tokens", "num_accepted_tokens"),
        ("tandem_generation_tokens", "output_tokens"),
        ("tandem_prompt_tokens", "prompt_tokens"),
    ):
        expected = sum(getattr(usage, field) for usage in usages)
        assert expected > 0
        assert running.sample(f"{metric}_total") == expected, metric
    for position in range(7):
        expected = sum(
            usage.accepted_per_position[position]
            for usage in usages
            if position < len(usage.accepted_per_position)
        )
        name = "tandem_spec_decode_num_accepted_tokens_per_pos_total"
        assert running.sample(name, position=str(position)) == expected
    for output in outputs:
        for finished in output.finished:
            choice = output.of(finished.choice_index)
            usage = choice.usage
            assert sum(chunk.num_steps for chunk in choice.chunks) == usage.num_steps
            drafted = sum(chunk.num_draft_tokens for chunk in choice.chunks)
            accepted = sum(chunk.num_accepted_tokens for chunk in choice.chunks)
            assert (drafted, accepted) == (usage.num_draft_tokens, usage.num_accepted_tokens)
            assert usage.output_tokens == usage.num_steps + usage.num_accepted_tokens
    check_latencies(running, num_choices=18)


def check_latencies(running: RunningGateway, *, num_choices: int) -> None:
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert running.sample(f"tandem_{name}_seconds_count") == num_choices
    assert running.sample("tandem_inter_token_latency_seconds_count") > 0


async def test_no_more_tokens_than_the_prompt_s_count_as_cached(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, 2, output_token_ids=[5, 6, 7])
    opened = await verifier.nth("open", 0)
    verifier.send(
        verifier.opened(opened.sequence_id, num_cached_tokens=4),
        verifier.decided(opened.sequence_id, 5, [8], finish=STOP),
    )
    usage = (await collect(call)).usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (2, 2)


async def test_requests_with_one_affinity_key_go_to_one_verifier(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifiers = [await start_verifier() for _ in range(3)]
    for verifier in verifiers:
        verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address for verifier in verifiers])
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    for _ in range(6):
        await running.generate(1, 2, 3, affinity_key="session")
    counts = sorted(len(verifier.commands("open")) for verifier in verifiers)
    assert counts == [0, 0, 6]
    (model,) = (await running.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert (model.model_id, model.num_verifiers, model.vocab_size) == ("scripted", 3, 2048)
    assert (model.max_model_len, model.max_num_speculative_tokens) == (2048, 7)
