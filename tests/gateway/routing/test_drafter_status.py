"""Verifiers report their drafters: sequences get, and move to, one that drafts."""

from collections import Counter

import pytest

from gateway.routing.router import choose_drafter
from tandem.v1 import verifier_pb2
from tandem.v1.sampling_pb2 import SpeculationParams
from tests.gateway.conftest import StartVerifier
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    StartGateway,
    collect,
    until,
)
from tests.gateway.scripted_verifier import STOP, ScriptedVerifier

pytestmark = pytest.mark.stand_in

UP = verifier_pb2.DrafterStatus.STATE_UP
SLOW = verifier_pb2.DrafterStatus.STATE_SLOW
DOWN = verifier_pb2.DrafterStatus.STATE_DOWN
IDLE = verifier_pb2.DrafterStatus.STATE_IDLE

ONE, TWO, THREE = DRAFTERS = [f"10.0.0.{index}:50051" for index in range(1, 4)]


def in_order(verifier: ScriptedVerifier) -> list[str]:
    """The drafters, in the order in which this verifier's sequences get them."""
    left, order = set(DRAFTERS), []
    while left:
        order.append(choose_drafter(verifier.address, left))
        left.remove(order[-1])
    return order


def used(verifier: ScriptedVerifier) -> Counter[str]:
    """How many sequences were opened with each drafter."""
    return Counter(opened.drafter_address for opened in verifier.commands("open"))


def drafters_of(verifier: ScriptedVerifier) -> dict[str, str]:
    """The drafter of every sequence, by the commands that the verifier received."""
    now = {each.sequence_id: each.drafter_address for each in verifier.commands("open")}
    for update in verifier.commands("update"):
        assert update.HasField("drafter_address")
        now[update.sequence_id] = update.drafter_address
    return now


async def open_many(
    running: RunningGateway, verifier: ScriptedVerifier, num_calls: int
) -> list[GenerateCall]:
    """Opens 16 sequences per call."""
    num_before = len(verifier.commands("open"))
    calls = [running.call(1, 2, 3, n=16) for _ in range(num_calls)]
    await verifier.nth("open", num_before + 16 * num_calls - 1)
    return calls


async def handled(running: RunningGateway, verifier: ScriptedVerifier) -> None:
    """Waits until the gateway has handled all that was sent, and moved what it moves."""
    num_ignored = running.sample(
        "tandem_peer_messages_ignored_total", peer="verifier", reason="rejected_command"
    )
    verifier.send(verifier.rejected("", code=3, message="a mark"))
    await until(
        lambda: (
            running.sample(
                "tandem_peer_messages_ignored_total", peer="verifier", reason="rejected_command"
            )
            > num_ignored
        )
    )
    await until(lambda: running.gateway.coordinator._moves.is_idle)
    # The updates have arrived when a command that was sent after them has.
    num_opens = len(verifier.commands("open"))
    call = running.call(9, speculation=SpeculationParams(enabled=False))
    await verifier.nth("open", num_opens)
    call.cancel()


@pytest.mark.parametrize("state", [SLOW, DOWN])
async def test_new_sequences_get_a_drafter_that_drafts(
    start_gateway: StartGateway, verifier: ScriptedVerifier, state: int
) -> None:
    verifier.play(lambda opened: [5, 0])
    first, second, third = in_order(verifier)
    verifier.first_events = [
        verifier.drafter_status(first, state),
        verifier.drafter_status(third, IDLE),
    ]
    running = await start_gateway(verifiers=[verifier.address], drafters=DRAFTERS)
    await running.generate(1, n=16)
    assert set(used(verifier)) == {second}, "nothing is known of it"


@pytest.mark.parametrize("state", [SLOW, DOWN])
async def test_sequences_move_once_to_drafters_that_draft_and_not_back(
    start_gateway: StartGateway, verifier: ScriptedVerifier, state: int
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=DRAFTERS)
    home, second, third = in_order(verifier)
    calls = await open_many(running, verifier, 8)
    assert set(drafters_of(verifier).values()) == {home}
    verifier.send(verifier.drafter_status(home, state))
    await verifier.nth("update", 127)
    assert set(drafters_of(verifier).values()) == {second}
    # It is back: nothing moves back, and new ones begin there. It fails again: only they move.
    verifier.send(verifier.drafter_status(home, UP))
    await handled(running, verifier)
    calls += await open_many(running, verifier, 1)
    assert Counter(drafters_of(verifier).values())[home] == 16
    for each in (state, UP, DOWN, UP):
        verifier.send(verifier.drafter_status(home, each))
        await handled(running, verifier)
    assert len(verifier.commands("update")) == 128 + 16
    assert Counter(drafters_of(verifier).values())[second] == 128 + 16
    verifier.send(verifier.drafter_status(second, state), verifier.drafter_status(home, DOWN))
    await handled(running, verifier)
    assert Counter(drafters_of(verifier).values())[third] == 128 + 16
    for call in calls:
        call.cancel()


async def test_a_state_counts_for_the_verifier_that_reports_it(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    # Of three, two have the same drafter.
    started = [await start_verifier() for _ in range(3)]
    by_home: dict[str, list[ScriptedVerifier]] = {}
    for each in started:
        by_home.setdefault(choose_drafter(each.address, [ONE, TWO]), []).append(each)
    home, verifiers = max(by_home.items(), key=lambda item: len(item[1]))
    verifiers = verifiers[:2]
    running = await start_gateway(
        verifiers=[verifier.address for verifier in verifiers], drafters=[ONE, TWO]
    )
    await until(lambda: all(link.welcome for link in running.gateway.fleet.verifiers))
    calls = [running.call(index, n=4) for index in range(16)]
    await until(lambda: sum(len(v.commands("open")) for v in verifiers) == 64)
    cut, whole = verifiers
    cut.send(cut.drafter_status(home, DOWN))
    await cut.nth("update", used(cut)[home] - 1)
    assert used(whole)[home] > 0
    assert not whole.commands("update")
    for call in calls:
        call.cancel()


def connected(running: RunningGateway) -> tuple[float, float]:
    verifiers, drafters = (
        running.sample("tandem_peers_connected", kind=kind) for kind in ("verifier", "drafter")
    )
    return verifiers, drafters


@pytest.mark.parametrize("num_drafters", [1, 3])
async def test_a_drafter_that_the_verifier_refuses_costs_drafts_only(
    start_gateway: StartGateway, verifier: ScriptedVerifier, num_drafters: int
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=DRAFTERS[:num_drafters], draft_wait="adaptive"
    )
    call = running.call(1, 2)
    for index in range(num_drafters):
        opened = await verifier.nth("open", index)
        assert opened.drafter_address
        verifier.send(
            verifier.rejected(
                opened.sequence_id, code=7, message="not allowed", field="drafter_address"
            )
        )
    last = await verifier.nth("open", num_drafters)
    assert (last.sequence_id, last.drafter_address) == (opened.sequence_id, "")
    assert not last.drafting
    assert set(used(verifier)) == {*DRAFTERS[:num_drafters], ""}
    verifier.send(
        verifier.opened(last.sequence_id), verifier.decided(last.sequence_id, 2, [5], finish=STOP)
    )
    assert (await collect(call)).token_ids == [5]
    num_refused = running.sample(
        "tandem_peer_messages_ignored_total", peer="verifier", reason="refused_drafter"
    )
    assert num_refused == num_drafters
    # Later sequences are opened without it at once.
    verifier.send(*(verifier.drafter_status(each, UP) for each in DRAFTERS[:num_drafters]))
    verifier.play(lambda opened: [5, 0])
    await running.generate(3)
    assert verifier.commands("open")[-1].drafter_address == ""


async def test_false_reports_are_counted_and_change_nothing(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], drafters=[ONE, TWO])
    calls = await open_many(running, verifier, 1)
    verifier.send(
        *(verifier.drafter_status(f"10.9.{i // 256}.{i % 256}:1", DOWN) for i in range(5000)),
        verifier.drafter_status(ONE, 0),
        verifier.drafter_status(ONE, 77),
    )
    await handled(running, verifier)
    # Some are kept: they may be found later.
    for reason, number in (("unknown_drafter", 5000 - 256 - 2), ("odd_event", 2)):
        assert number == running.sample(
            "tandem_peer_messages_ignored_total", peer="verifier", reason=reason
        )
    assert not verifier.commands("update")
    assert not {ONE, TWO} & set(running.gateway.fleet.drafters._states[verifier.address])
    logged = [e["reason"] for e in running.log if e["event"] == "peer_message_ignored"]
    assert len(set(logged)) == len(logged), "one line per reason"
    for call in calls:
        call.cancel()


async def test_a_flood_of_reports_moves_each_sequence_a_bounded_number_of_times(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    """However many changes a message holds, only the states after it count."""
    running = await start_gateway(verifiers=[verifier.address], drafters=[ONE, TWO])
    calls = await open_many(running, verifier, 8)
    verifier.send(
        *(
            verifier.drafter_status(address, state)
            for _ in range(2000)
            for address in (ONE, TWO)
            for state in (DOWN, UP)
        ),
        verifier.drafter_status(choose_drafter(verifier.address, [ONE, TWO]), DOWN),
    )
    await handled(running, verifier)
    updates = Counter(update.sequence_id for update in verifier.commands("update"))
    assert len(updates) == 128
    assert set(updates.values()) == {1}
    for call in calls:
        call.cancel()


async def test_sequences_that_were_opened_without_a_drafter_get_the_first_one(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    """Its matching policy comes with the Open; those that want no drafts never get one."""
    running = await start_gateway(verifiers=[verifier.address], drafters=[])
    plain = running.call(1, 2, speculation=SpeculationParams(enabled=False))
    await verifier.nth("open", 0)
    calls = await open_many(running, verifier, 2)
    opens = verifier.commands("open")
    assert {each.drafter_address for each in opens} == {""}
    assert [each.HasField("ngram") for each in opens] == [False] + [True] * 32
    assert not any(each.drafting for each in opens), "no step waits for hints that nobody makes"
    running.gateway.coordinator.set_drafters([ONE])
    await handled(running, verifier)
    assert set(list(drafters_of(verifier).values())[1:33]) == {ONE}
    assert len(verifier.commands("update")) == 32
    running.gateway.coordinator.set_drafters([ONE, TWO])
    await handled(running, verifier)
    assert len(verifier.commands("update")) == 32, "they have one that is able"
    for call in (plain, *calls):
        call.cancel()


async def test_after_a_new_session_nothing_is_known_of_the_drafters(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    home, other, _ = in_order(verifier)
    verifier.first_events = [
        verifier.drafter_status(home, DOWN),
        verifier.drafter_status(other, UP),
    ]
    running = await start_gateway(verifiers=[verifier.address], drafters=[home, other])
    await until(lambda: connected(running) == (1, 1))
    verifier.play(lambda opened: [5, 0])
    await running.generate(1, n=16)
    assert set(used(verifier)) == {other}
    verifier.first_events = []
    verifier.end_session()
    await until(lambda: verifier.num_sessions == 2)
    await until(lambda: connected(running) == (1, 0))
    await running.generate(1, n=16)
    assert used(verifier) == {other: 16, home: 16}
