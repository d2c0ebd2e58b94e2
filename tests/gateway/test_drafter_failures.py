"""A drafter that is absent, slow, forgetful or dies costs drafts, and nothing else."""

import asyncio

import pytest

from tandem.v1 import drafter_pb2
from tests.gateway.conftest import StartDrafter
from tests.gateway.running_gateway import Output, StartGateway, add, read, until
from tests.gateway.scripted_drafter import ScriptedDrafter
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

PROMPT = list(range(10, 60))


def repeats(num_tokens: int) -> list[int]:
    """Repeats the prompt several times, then stops."""
    return [PROMPT[index % len(PROMPT)] for index in range(num_tokens)] + [0]


async def test_without_a_drafter_the_output_is_whole(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    verifier.play(lambda opened: repeats(20))
    running = await start_gateway(
        verifiers=[verifier.address], drafters=["127.0.0.1:1"], are_drafters_up=False
    )
    output = await running.generate(*PROMPT)
    assert output.token_ids == repeats(20)
    assert not verifier.commands("open")[0].drafting
    usage = output.usage
    assert (usage.num_steps, usage.num_drafts, usage.num_draft_tokens) == (21, 0, 0)


async def test_a_drafter_that_dies_and_comes_back_is_used_again_in_the_same_stream(
    start_gateway: StartGateway, verifier: ScriptedVerifier, start_drafter: StartDrafter
) -> None:
    """The verifier steps by hand, so that the text outlasts the drafter's absence."""
    drafter = await start_drafter()
    address = drafter.server.address
    running = await start_gateway(verifiers=[verifier.address], drafters=[address])
    text = repeats(200)
    call = running.call(*PROMPT)
    output = Output()
    add(output, await read(call))
    opened = await verifier.nth("open", 0)
    assert opened.drafting
    sent = 0

    async def step(num_tokens: int, finish: int = 0) -> None:
        nonlocal sent
        token_ids = text[sent : sent + num_tokens]
        verifier.send(
            verifier.decided(opened.sequence_id, len(PROMPT) + sent, token_ids, finish=finish)
        )
        sent += num_tokens
        while len(output.token_ids) < sent:
            add(output, await read(call))

    await step(5)
    first = await verifier.nth("draft", 0)
    # Enough for several steps.
    assert list(first.token_ids) == text[5 : 5 + 24]

    await drafter.server.stop(0)
    update = await verifier.nth("update", 0)
    assert (update.sequence_id, update.drafting) == (opened.sequence_id, False)
    num_drafts = len(verifier.commands("draft"))
    for _ in range(5):
        await step(3)
    assert len(verifier.commands("draft")) == num_drafts

    drafter = await start_drafter(address)
    hint = await verifier.nth("draft", num_drafts)  # nothing was decided meanwhile
    assert hint.base_length == len(PROMPT) + sent
    assert list(hint.token_ids) == text[sent : sent + 24]
    (update,) = verifier.commands("update")[1:]
    assert update.drafting
    kinds = [
        command.WhichOneof("command")
        for message in verifier.messages
        for command in message.commands
    ]
    assert kinds.index("update", kinds.index("update") + 1) < len(kinds) - kinds[::-1].index(
        "draft"
    ), "a hint for a sequence that is not drafted for would be lost"
    await step(4)
    await verifier.nth("draft", num_drafts + 1)
    await step(len(text) - sent, finish=STOP)
    assert output.token_ids == text
    await read(call)
    await running.until_idle()


async def test_a_drafter_that_answers_late_is_not_waited_for(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    verifier.play(lambda opened: repeats(30))
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], draft_deadline_s=0.05
    )
    scripted_drafter.holds = True
    output = await running.generate(*PROMPT)
    assert output.token_ids == repeats(30)
    assert [update.drafting for update in verifier.commands("update")] == [False]
    assert any(entry.get("reason") == "late_answer" for entry in running.log)
    (link,) = running.gateway.fleet.drafters
    assert link.is_slow
    scripted_drafter.let_go()
    await until(lambda: not link.is_slow)
    assert scripted_drafter.num_streams == 1


async def test_after_a_late_answer_hints_continue_without_a_replay(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], draft_deadline_s=0.2
    )
    call = running.call(*PROMPT)
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    scripted_drafter.holds = True
    for index in range(3):
        verifier.send(verifier.decided(opened.sequence_id, 50 + index, [3]))
    update = await verifier.nth("update", 0)
    assert not update.drafting
    assert not verifier.commands("draft")
    scripted_drafter.let_go()
    # A late hint is forwarded: the verifier realigns it. Then steps may wait for hints again.
    await verifier.until(lambda: any(d.base_length == 53 for d in verifier.commands("draft")))
    update = await verifier.nth("update", 1)
    assert update.drafting
    assert scripted_drafter.num_streams == 1
    sent = [(delta.base_length, len(delta.token_ids)) for delta in scripted_drafter.deltas()]
    assert sent[0] == (0, 50)
    assert sum(num_tokens for _, num_tokens in sent) == 53, "each token once"
    call.cancel()


async def test_the_stream_of_a_drafter_that_never_answers_ends(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], draft_deadline_s=0.01
    )
    scripted_drafter.holds = True
    call = running.call(*PROMPT)
    await until(lambda: scripted_drafter.num_streams == 2)
    assert any("no answer within 0.4 s" in str(entry.get("reason")) for entry in running.log)
    call.cancel()
    scripted_drafter.let_go()


async def test_an_idle_drafter_is_not_late(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], draft_deadline_s=0.02
    )
    call = running.call(*PROMPT)
    await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    link = running.gateway.fleet.drafters[0]
    await until(lambda: link._deadline_timer is None)  # the deadline has passed
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.decided(opened.sequence_id, 50, [3]))
    await verifier.nth("draft", 0)
    assert scripted_drafter.num_streams == 1
    assert not verifier.commands("update")
    call.cancel()


async def test_a_drafter_is_late_only_when_its_oldest_answer_is(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], draft_deadline_s=100.0
    )
    call = running.call(*PROMPT)
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    scripted_drafter.holds = True
    verifier.send(verifier.decided(opened.sequence_id, 50, [3]))
    await scripted_drafter.nth(1)
    (link,) = running.gateway.fleet.drafters
    link._check_deadline()  # set for a batch that was answered long ago
    scripted_drafter.let_go()
    await verifier.nth("draft", 0)
    assert scripted_drafter.num_streams == 1
    call.cancel()


async def test_a_history_that_the_drafter_lost_is_replayed(
    start_gateway: StartGateway, verifier: ScriptedVerifier, start_drafter: StartDrafter
) -> None:
    drafter = await start_drafter()
    running = await start_gateway(verifiers=[verifier.address], drafters=[drafter.server.address])
    text = repeats(100)
    call = running.call(*PROMPT)
    opened = await verifier.nth("open", 0)
    verifier.send(verifier.decided(opened.sequence_id, 50, text[:5]))
    await verifier.nth("draft", 0)
    drafter.store.release(opened.sequence_id)
    verifier.send(verifier.decided(opened.sequence_id, 55, text[5:10]))
    lost = await verifier.nth("draft", 1)
    assert (lost.base_length, lost.token_ids) == (60, [])
    found = await verifier.nth("draft", 2)
    assert (found.base_length, list(found.token_ids)) == (60, text[10:34])
    call.cancel()


async def test_a_sequence_that_the_drafter_refuses_continues_without_drafts(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    scripted_drafter.answer = lambda delta: drafter_pb2.Proposal(
        sequence_id=delta.sequence_id,
        status=drafter_pb2.STATUS_INVALID,
        message="token_ids: too long",
    )
    verifier.play(lambda opened: repeats(10))
    output = await running.generate(*PROMPT)
    assert output.token_ids == repeats(10)
    assert output.usage.num_drafts == 0
    assert [update.drafting for update in verifier.commands("update")] == [False]
    assert any(entry.get("detail") == "token_ids: too long" for entry in running.log)


async def test_invalid_proposals_are_counted_and_cost_only_their_drafts(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    scripted_drafter.answer = lambda delta: drafter_pb2.Proposal(
        sequence_id="somebody else", status=drafter_pb2.STATUS_OK
    )
    verifier.play(lambda opened: repeats(10))
    output = await running.generate(*PROMPT)
    assert output.token_ids == repeats(10)
    assert output.usage.num_drafts == 0
    assert scripted_drafter.num_streams == 1
    num_ignored = running.sample(
        "tandem_peer_messages_ignored_total", peer="drafter", reason="odd_proposal"
    )
    assert num_ignored >= 10
    assert [e["reason"] for e in running.log if e["event"] == "peer_message_ignored"] == [
        "odd_proposal"
    ]


async def test_answers_to_unknown_batches_end_the_stream_and_not_the_request(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    scripted_drafter.wrong_batch_ids = 1
    verifier.play(lambda opened: repeats(10))
    output = await running.generate(*PROMPT)
    assert output.token_ids == repeats(10)
    assert any("is invalid" in str(entry.get("reason")) for entry in running.log)


async def test_drafts_that_are_wrong_change_nothing_but_the_counts(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[scripted_drafter.address])
    scripted_drafter.answer = lambda delta: drafter_pb2.Proposal(
        sequence_id=delta.sequence_id,
        base_length=delta.base_length + len(delta.token_ids),
        token_ids=[2047] * 100,
        status=drafter_pb2.STATUS_OK,
    )
    verifier.play(lambda opened: repeats(10))
    output = await running.generate(*PROMPT, max_new_tokens=10)
    assert output.token_ids == repeats(10)[:10]
    assert output.usage.num_drafts == 8, "not at the first token, nor where one is left"
    assert output.usage.num_draft_tokens == 7 + 7 + 6 + 5 + 4 + 3 + 2 + 1
    assert output.usage.num_accepted_tokens == 0


async def test_of_several_drafters_one_that_is_down_or_slow_gets_no_new_sequences(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    start_drafter: StartDrafter,
    scripted_drafter: ScriptedDrafter,
) -> None:
    drafter = await start_drafter()
    verifier.play(lambda opened: repeats(40))
    running = await start_gateway(
        verifiers=[verifier.address],
        drafters=[drafter.server.address, "127.0.0.1:1", scripted_drafter.address],
        are_drafters_up=False,
        draft_deadline_s=1.0,
    )
    able, _, slow = running.gateway.fleet.drafters
    await until(lambda: able.is_up and slow.is_up)
    scripted_drafter.holds = True
    calls = []
    while not slow.is_slow:
        calls.append(running.call(*PROMPT))
        await read(calls[-1])
        await until(lambda: slow.is_slow or not slow._feed._in_flight)
    num_batches = len(scripted_drafter.batches)
    outputs = await asyncio.gather(*(running.generate(*PROMPT) for _ in range(24)))
    assert all(output.token_ids == repeats(40) for output in outputs)
    assert all(output.usage.num_drafts > 0 for output in outputs)
    assert len({d.sequence_id for d in scripted_drafter.deltas()}) <= num_batches
    scripted_drafter.let_go()
    for call in calls:
        call.cancel()


async def test_a_drafters_end_does_not_delay_waiting_clients(
    start_gateway: StartGateway, verifier: ScriptedVerifier, scripted_drafter: ScriptedDrafter
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address],
        drafters=[scripted_drafter.address],
        client_delay_s=1000.0,
        draft_deadline_s=1000.0,
    )
    call = running.call(*PROMPT)
    await read(call)
    opened = await verifier.nth("open", 0)
    await scripted_drafter.nth(0)
    scripted_drafter.holds = True
    verifier.send(verifier.decided(opened.sequence_id, 50, [3], finish=0))
    await scripted_drafter.nth(1)
    await scripted_drafter.stop()
    assert (await read(call)).chunk.token_ids == [3]
    call.cancel()
