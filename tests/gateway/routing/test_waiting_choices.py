"""A choice that waits at a verifier goes to another one that has room, and loses nothing by it."""

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from gateway.routing.live_sequences import LiveSequences
from gateway.routing.router import affinity_of, best
from tandem.v1 import verifier_pb2
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

_STEP_S = 0.005
# Longer than the gateway pauses after it found none to move.
_STEPS_UNTIL_ANY_SEARCH = 30

INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 3, 8, 13, 14


@dataclass
class Queue:
    """A gateway of two verifiers, of which one is not there, and calls that wait at the other.

    The first call runs there. Both make steps all the time, and report how many wait.

    Attributes:
        key: of all calls; the router ranks `busy` first for it.
    """

    busy: ScriptedVerifier
    key: str
    running: RunningGateway
    address: str
    start_verifier: StartVerifier
    calls: list[GenerateCall]
    opens: list[verifier_pb2.Open]
    reports: dict[ScriptedVerifier, int] = field(default_factory=dict)

    async def another_comes(self) -> ScriptedVerifier:
        """The other verifier; the gateway is connected to it."""
        num_before = self.num_connected
        other = await self.start_verifier(listen=self.address)
        self.reports[other] = 0
        await until(lambda: self.num_connected > num_before)
        return other

    @property
    def num_connected(self) -> int:
        return sum(each.welcome is not None for each in self.running.gateway.fleet.verifiers)

    @property
    def num_moves(self) -> float:
        return self.running.sample("tandem_request_retries_total", reason="waiting")

    async def report(self, num_waiting: int, verifier: ScriptedVerifier | None = None) -> None:
        """From now on `busy`, or another one, reports that so many wait; steps later."""
        verifier = verifier or self.busy
        self.reports[verifier] = num_waiting
        num_steps = verifier.num_steps + _STEPS_UNTIL_ANY_SEARCH
        await until(lambda: verifier.num_steps > num_steps)

    async def step(self) -> None:
        """Makes the steps, until cancelled."""
        while True:
            for verifier, num_waiting in self.reports.items():
                verifier.tell_step(num_waiting=num_waiting)
            await asyncio.sleep(_STEP_S)

    async def end_all(self, *others: ScriptedVerifier) -> list[list[int]]:
        """Every sequence that is live gets one token, 7, and ends; the calls' tokens."""
        self.reports[self.busy] = 0
        ending = asyncio.ensure_future(self._end_live((self.busy, *others)))
        outputs = await asyncio.gather(*(collect(call) for call in self.calls))
        ending.cancel()
        return [output.token_ids for output in outputs]

    async def _end_live(self, verifiers: tuple[ScriptedVerifier, ...]) -> None:
        sequences = self.running.gateway.coordinator._sequences
        while True:
            for verifier, opened in itertools.chain.from_iterable(
                zip(itertools.repeat(each), each.commands("open"), strict=False)
                for each in verifiers
            ):
                live = sequences.find(opened.sequence_id)
                if live is not None and live.verifier.name == verifier.address:
                    events = [] if live.is_running else [verifier.opened(opened.sequence_id)]
                    length = len(live.generation.token_ids)
                    decided = verifier.decided(opened.sequence_id, length, [7], finish=STOP)
                    verifier.send(*events, decided)
                    await until(functools.partial(_is_gone, sequences, opened.sequence_id))
            await asyncio.sleep(0.001)


def _is_gone(sequences: LiveSequences, sequence_id: str) -> bool:
    return sequences.find(sequence_id) is None


StartQueue = Callable[..., Awaitable[Queue]]


@pytest.fixture
async def start_queue(
    start_gateway: StartGateway, start_verifier: StartVerifier, unused_tcp_port: int
) -> AsyncIterator[StartQueue]:
    stepping: list[asyncio.Task[None]] = []

    async def start(num_calls: int, *, num_waiting: int | None = None, **options: object) -> Queue:
        busy = await start_verifier()
        address = f"127.0.0.1:{unused_tcp_port}"
        # None of them is taken to be stuck.
        patience = {"failover_after_s": 60.0, "progress_timeout_s": 60.0}
        running = await start_gateway(verifiers=[busy.address, address], **patience, **options)
        key = next(
            key
            for key in map(str, itertools.count())
            if best(affinity_of(key, ()), [busy.address, address]) == busy.address
        )
        calls, opens = [], []
        for index in range(num_calls):
            calls.append(running.call(index + 1, affinity_key=key))
            opens.append(await busy.nth("open", index))
        busy.send(busy.opened(opens[0].sequence_id))
        queue = Queue(busy, key, running, address, start_verifier, calls, opens)
        stepping.append(asyncio.ensure_future(queue.step()))
        await queue.report(num_calls - 1 if num_waiting is None else num_waiting)
        return queue

    yield start
    for each in stepping:
        each.cancel()


async def test_they_go_one_by_one_to_a_verifier_that_comes_until_the_router_keeps_the_rest(
    start_queue: StartQueue,
) -> None:
    queue = await start_queue(7)
    other = await queue.another_comes()
    first = await other.nth("open", 0)
    closed = await queue.busy.nth("close", 0)
    # The last one: nobody who came before it waits longer than without the move.
    assert closed.sequence_id == queue.opens[-1].sequence_id
    assert list(first.token_ids) == list(queue.opens[-1].token_ids)
    assert first.sequence_id != closed.sequence_id, "events of the former verifier may still come"
    await queue.report(5)
    assert queue.num_moves == 1, "the other verifier has one that waits"
    other.send(other.opened(first.sequence_id))
    second = await other.nth("open", 1)
    other.send(other.opened(second.sequence_id))
    await queue.report(4)
    # Five and two: the router would send none of the five elsewhere.
    assert (queue.num_moves, len(other.commands("open"))) == (2, 2)
    assert await queue.end_all(other) == [[7]] * 7
    await queue.running.until_idle()
    assert len(queue.busy.commands("close")) == 2
    moved = [each for each in queue.running.log if each["event"] == "choice_moved"]
    assert [each["former_verifier"] for each in moved] == [queue.busy.address] * 2
    assert moved[0]["former_sequence_id"] == closed.sequence_id
    assert moved[0]["sequence_id"] == first.sequence_id


@pytest.mark.parametrize("code", [INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE])
async def test_a_verifier_that_refuses_one_does_not_end_it_and_gets_it_no_more(
    start_queue: StartQueue, code: int
) -> None:
    queue = await start_queue(4)
    other = await queue.another_comes()
    opened = await other.nth("open", 0)
    other.send(other.rejected(opened.sequence_id, code=code, message="no", retry_after_ms=1))
    again = await queue.busy.nth("open", 4)
    assert list(again.token_ids) == list(opened.token_ids)
    # Others may go there, when it has room again.
    another = await other.nth("open", 1)
    assert list(another.token_ids) != list(opened.token_ids)
    assert await queue.end_all(other) == [[7]] * 4
    assert queue.num_moves == 2


async def test_a_refusal_needs_no_retry_and_no_time_that_was_spent_waiting(
    start_queue: StartQueue,
) -> None:
    queue = await start_queue(4, resume_timeout_s=1.0)
    coordinator = queue.running.gateway.coordinator
    while coordinator._failover.retries.take("scripted"):
        pass
    other = await queue.another_comes()
    opened = await other.nth("open", 0)
    other.send(other.rejected(opened.sequence_id, code=RESOURCE_EXHAUSTED, retry_after_ms=1))
    again = await queue.busy.nth("open", 4)
    assert list(again.token_ids) == [4]
    # The next one has output when its verifier is lost, and waits longer than it might for another.
    opened = await other.nth("open", 1)
    other.send(other.opened(opened.sequence_id), other.decided(opened.sequence_id, 1, [5]))
    await until(lambda: queue.running.sample("tandem_generation_tokens_total") == 1)
    await other.stop()
    again = await queue.busy.nth("open", 5)
    assert list(again.token_ids) == [3, 5]
    lost = coordinator._sequences.find(again.sequence_id)
    assert lost is not None
    expires_s = lost.displaced.expires_s if lost.displaced else 0.0
    await until(lambda: asyncio.get_running_loop().time() > expires_s)
    other = await queue.another_comes()
    opened = await other.nth("open", 0)
    assert list(opened.token_ids) == [3, 5]
    for link in queue.running.gateway.fleet.verifiers:
        link.load.full_until_s = link.load.overfull_until_s = time.monotonic() + 0.4
    other.send(other.rejected(opened.sequence_id, code=RESOURCE_EXHAUSTED, retry_after_ms=400))
    again = await queue.busy.nth("open", 6)
    assert list(again.token_ids) == [3, 5]
    assert await queue.end_all(other) == [[7], [7], [5, 7], [7]]


async def test_choices_of_a_request_wait_where_the_first_one_computes_their_prompt(
    start_queue: StartQueue,
) -> None:
    queue = await start_queue(1)
    queue.calls.append(queue.running.call(1, n=6, affinity_key=queue.key))
    first = await queue.busy.nth("open", 1)
    await queue.busy.nth("open", 6)
    queue.busy.send(queue.busy.opened(first.sequence_id))
    other = await queue.another_comes()
    await queue.report(5)
    assert queue.num_moves == 0
    queue.busy.send(queue.busy.decided(first.sequence_id, 1, [5]))
    # It is in the prefix cache now: the others wait for room.
    await other.nth("open", 0)
    assert [sorted(each) for each in await queue.end_all(other)] == [[7], [5, *[7] * 6]]
