"""The flow of a step: deltas to the drafter, hints to the verifier, then tokens to the client."""

import asyncio

import grpc
import pytest

from tandem.v1 import drafter_pb2, drafter_pb2_grpc, sampling_pb2, verifier_pb2
from tests.gateway.conftest import StartDrafter, StartVerifier
from tests.gateway.running_gateway import Output, StartGateway, add, collect, read, until
from tests.gateway.scripted_drafter import ScriptedDrafter, no_match
from tests.gateway.scripted_verifier import LENGTH, STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

LONG_S = 1000.0


async def test_prompt_and_open_are_sent_at_the_same_time(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], hint_tokens=24
    )
    call = running.call(5, 6, 7, sampling=sampling_pb2.SamplingParams(temperature=1, seed=3))
    opened = await verifier.nth("open", 0)
    delta = await scripted_drafter.nth(0)  # no token was decided yet
    assert delta == drafter_pb2.SequenceDelta(
        sequence_id=opened.sequence_id,
        token_ids=[5, 6, 7],
        prompt_length=3,
        max_length=2048,
        params=drafter_pb2.NgramParams(
            min_ngram=2,
            max_ngram=5,
            overlap=drafter_pb2.OVERLAP_DISJOINT,
            tie=drafter_pb2.TIE_LONGEST,
            tokens_per_match=8,
            algorithm=drafter_pb2.ALGORITHM_INDEX,
        ),
    )
    assert opened.token_ids == [5, 6, 7]
    assert opened.tokens_per_match == 2
    assert opened.drafting
    assert opened.draft_wait == verifier_pb2.DRAFT_WAIT_ALWAYS
    assert opened.num_speculative_tokens == 7
    assert opened.max_new_tokens == 2045
    assert opened.sampling == sampling_pb2.SamplingParams(temperature=1, seed=3)
    assert len(opened.sequence_id) == 32
    call.cancel()


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


async def test_each_step_gives_one_batch_of_deltas_and_one_message_of_hints(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    calls = [running.call(*range(1, 4 + index)) for index in range(5)]
    await verifier.nth("open", 4)
    await scripted_drafter.until(lambda: len(scripted_drafter.deltas()) == 5)
    length = {command.sequence_id: len(command.token_ids) for command in verifier.commands("open")}
    scripted_drafter.answer = lambda delta: drafter_pb2.Proposal(
        sequence_id=delta.sequence_id,
        base_length=delta.base_length + len(delta.token_ids),
        token_ids=[delta.base_length, 9],
        matched_ngram_length=4,
        status=drafter_pb2.STATUS_OK,
    )
    for _ in range(3):
        num_batches, num_messages = len(scripted_drafter.batches), len(verifier.messages)
        num_hints = len(verifier.commands("draft"))
        verifier.send(*(verifier.decided(name, length[name], [8, 8], wanted=6) for name in length))
        await verifier.nth("draft", num_hints + 4)
        (batch,) = scripted_drafter.batches[num_batches:]
        assert [delta.base_length for delta in batch.sequences] == list(length.values())
        assert all(delta.token_ids == [8, 8] for delta in batch.sequences)
        assert all(delta.max_draft_tokens == 6 for delta in batch.sequences)
        (message,) = verifier.messages[num_messages:]
        assert [command.draft for command in message.commands] == [
            verifier_pb2.Draft(
                sequence_id=name,
                base_length=length[name] + 2,
                token_ids=[length[name], 9],
                matched_ngram_length=4,
            )
            for name in length
        ]
        length = {name: base_length + 2 for name, base_length in length.items()}
    for call in calls:
        call.cancel()


async def test_an_empty_proposal_is_forwarded_too(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    call = running.call(1, 2)
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.decided(opened.sequence_id, 2, [3]))
    draft = await verifier.nth("draft", 0)
    assert (draft.base_length, draft.token_ids) == (3, [])
    call.cancel()


async def test_clients_get_their_tokens_after_the_hints(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address],
        drafters=[scripted_drafter.address],
        client_delay_s=LONG_S,
        draft_deadline_s=LONG_S,
    )
    call = running.call(1, 2)
    assert (await read(call)).HasField("started")
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    scripted_drafter.holds = True
    verifier.send(verifier.decided(opened.sequence_id, 2, [3]))
    await scripted_drafter.nth(1)
    waiting = asyncio.ensure_future(read(call))
    # Another client's request, which waits for no draft, is served whole before.
    undrafted = sampling_pb2.SpeculationParams(enabled=False)
    other = asyncio.ensure_future(running.generate(1, speculation=undrafted, max_new_tokens=1))
    second = await verifier.nth("open", 1)
    verifier.send(verifier.decided(second.sequence_id, 1, [4], finish=LENGTH))
    await until(lambda: len(running.gateway.coordinator._delivery._due_s) == 2)
    assert not waiting.done()
    scripted_drafter.let_go()
    await verifier.nth("draft", 0)
    assert (await waiting).chunk.token_ids == [3]
    assert (await other).token_ids == [4]
    call.cancel()


async def test_a_slow_drafter_delays_clients_for_a_bounded_time(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address],
        drafters=[scripted_drafter.address],
        client_delay_s=0.005,
        draft_deadline_s=LONG_S,
    )
    call = running.call(1, 2)
    await read(call)
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    scripted_drafter.holds = True
    verifier.send(verifier.decided(opened.sequence_id, 2, [3]))
    assert (await read(call)).chunk.token_ids == [3]
    assert not verifier.commands("draft")
    scripted_drafter.let_go()
    call.cancel()


async def test_long_prompts_are_sent_in_deltas_of_at_most_8192_tokens(
    start_gateway: StartGateway,
    start_verifier: StartVerifier,
    scripted_drafter: ScriptedDrafter,
) -> None:
    verifier = await start_verifier(max_model_len=50_000)
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    prompt = [index % 2000 for index in range(20_000)]
    call = running.call(*prompt)
    await scripted_drafter.until(lambda: len(scripted_drafter.deltas()) == 3)
    deltas = scripted_drafter.deltas()
    assert [delta.base_length for delta in deltas] == [0, 8192, 16384]
    assert [token for delta in deltas for token in delta.token_ids] == prompt
    assert (await verifier.nth("open", 0)).token_ids == prompt
    call.cancel()


async def test_no_drafts_are_requested_for_a_sequence_that_can_use_none(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    call = running.call(1, 2)
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.decided(opened.sequence_id, 2, [3], wanted=0))
    verifier.send(verifier.decided(opened.sequence_id, 3, [4]))
    await scripted_drafter.until(
        lambda: sum(len(delta.token_ids) for delta in scripted_drafter.deltas()) == 4
    )
    assert [list(d.token_ids) for d in scripted_drafter.deltas() if d.max_draft_tokens] == [[3, 4]]
    call.cancel()


async def test_requests_with_their_own_speculation_are_mixed_in_one_batch(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    params = {
        "own": sampling_pb2.SpeculationParams(
            num_speculative_tokens=3,
            prompt_lookup_min=1,
            prompt_lookup_max=4,
            overlap=drafter_pb2.OVERLAP_ALLOWED,
            tie=drafter_pb2.TIE_LATEST,
        ),
        "off": sampling_pb2.SpeculationParams(enabled=False),
        "none": sampling_pb2.SpeculationParams(num_speculative_tokens=0),
        "default": sampling_pb2.SpeculationParams(),
    }
    calls = [
        running.call(1, 2, index, speculation=speculation)
        for index, speculation in enumerate(params.values())
    ]
    await verifier.nth("open", 3)
    await scripted_drafter.until(lambda: len(scripted_drafter.deltas()) == 2)
    commands = sorted(verifier.commands("open"), key=lambda command: command.token_ids[2])
    opened = dict(zip(params, commands, strict=True))
    assert {name: (c.drafting, c.num_speculative_tokens) for name, c in opened.items()} == {
        "own": (True, 3),
        "off": (False, 0),
        "none": (False, 0),
        "default": (True, 7),
    }
    fed = {delta.sequence_id: delta for delta in scripted_drafter.deltas()}
    assert set(fed) == {opened["own"].sequence_id, opened["default"].sequence_id}
    assert fed[opened["own"].sequence_id].params == drafter_pb2.NgramParams(
        min_ngram=1,
        max_ngram=4,
        overlap=drafter_pb2.OVERLAP_ALLOWED,
        tie=drafter_pb2.TIE_LATEST,
        tokens_per_match=0,
        algorithm=drafter_pb2.ALGORITHM_INDEX,
    )
    verifier.send(*(verifier.decided(c.sequence_id, 3, [9]) for c in opened.values()))
    await verifier.nth("draft", 1)
    assert {draft.sequence_id for draft in verifier.commands("draft")} == set(fed)
    for call in calls:
        call.cancel()


async def test_a_finished_sequence_is_released_at_the_drafter(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    call = running.call(1, 2)
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    verifier.send(verifier.decided(opened.sequence_id, 2, [3], finish=STOP))
    await collect(call)
    await scripted_drafter.until(lambda: scripted_drafter.releases() == [opened.sequence_id])
    assert not verifier.commands("close")


async def test_each_step_is_a_chunk_of_its_own_for_a_client_that_keeps_up(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    call = running.call(1, 2)
    output = Output()
    add(output, await read(call))
    opened = await verifier.nth("open", 0)
    for index in range(5):
        finish = STOP if index == 4 else 0
        verifier.send(verifier.decided(opened.sequence_id, 2 + index, [10 + index], finish=finish))
        add(output, await read(call))
    assert [(chunk.offset, chunk.num_steps) for chunk in output.chunks] == [
        (index, 1) for index in range(5)
    ]
    assert (await read(call)).finished.finish_reason == STOP


@pytest.mark.parametrize("num_sequences", [1, 8])
async def test_a_real_drafter_drafts_repeated_text(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    start_drafter: StartDrafter,
    num_sequences: int,
) -> None:
    drafter = await start_drafter()
    verifier.play(lambda opened: [*opened.token_ids, 0])
    running = await start_gateway(verifiers=[verifier.address], drafters=[drafter.server.address])
    prompts = [[*range(10 + index, 60 + index)] for index in range(num_sequences)]
    outputs = await asyncio.gather(*(running.generate(*prompt) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == [*prompt, 0]
        # 2 tokens to match, then 7 drafts and a bonus token per step.
        assert output.usage.num_steps == 9
        assert output.usage.num_accepted_tokens == 51 - 9
    await until(lambda: drafter.store.num_sequences == 0)


async def test_the_stand_in_answers_no_match_as_a_real_drafter_does(
    start_drafter: StartDrafter,
) -> None:
    """The stand-in answers as the real one does to text without repetition."""
    drafter = await start_drafter()
    delta = drafter_pb2.SequenceDelta(sequence_id="a", token_ids=[1, 2, 3], max_draft_tokens=4)
    async with grpc.aio.insecure_channel(drafter.server.address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        response = await stub.Propose(drafter_pb2.ProposeRequest(sequences=[delta]))
    assert list(response.proposals) == [no_match(delta)]
