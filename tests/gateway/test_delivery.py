"""Clients after hints, but not for long, and few at a time."""

import asyncio
from collections.abc import Sequence

from gateway.generation.delivery import CLIENTS_PER_ITERATION, Delivery
from gateway.generation.generation import Generation
from tests.gateway.factories import make_generation

FOR_EVER_S = 1000.0


class Rig:
    """A delivery, what it published and whether drafts are awaited."""

    def __init__(self, max_delay_s: float = FOR_EVER_S) -> None:
        self.awaits_drafts = False
        self.turns: list[list[Generation]] = []
        self.published = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.delivery = Delivery(
            publish=self.publish,
            awaits_drafts=lambda: self.awaits_drafts,
            max_delay_s=max_delay_s,
        )

    def publish(self, generations: Sequence[Generation]) -> None:
        self.turns.append(list(generations))
        self.published.set()

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            self.delivery.add(generation, self.loop.time())
        self.delivery.resume()


async def turns(count: int) -> None:
    """Lets the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_without_hints_to_wait_for_clients_are_served_at_the_next_turn() -> None:
    rig = Rig()
    generation = make_generation()
    rig.add(generation)
    assert rig.turns == [], "never inside the step itself"
    await turns(1)
    assert rig.turns == [[generation]]
    assert rig.delivery.is_idle


async def test_while_hints_are_awaited_clients_wait() -> None:
    rig = Rig()
    rig.awaits_drafts = True
    rig.add(make_generation())
    await turns(20)
    assert rig.turns == []
    rig.awaits_drafts = False
    rig.delivery.resume()
    assert rig.turns == [], "behind the writer that was woken with the hints"
    await turns(1)
    assert len(rig.turns) == 1


async def test_hints_that_do_not_come_hold_clients_up_for_a_bounded_time() -> None:
    rig = Rig(max_delay_s=0.01)
    rig.awaits_drafts = True
    rig.add(make_generation())
    async with asyncio.timeout(60):
        await rig.published.wait()
    assert rig.delivery.is_idle


async def test_many_clients_are_served_in_turns_between_which_the_loop_is_free() -> None:
    rig = Rig()
    generations = [make_generation() for _ in range(3 * CLIENTS_PER_ITERATION - 1)]
    rig.add(*generations)
    await turns(1)
    assert len(rig.turns) == 1
    rig.awaits_drafts = True  # the next step has ended meanwhile: its hints go first
    await turns(20)
    assert len(rig.turns) == 1
    rig.awaits_drafts = False
    rig.delivery.resume()
    await turns(20)
    assert [len(turn) for turn in rig.turns] == [4, 4, 3]
    assert [generation for turn in rig.turns for generation in turn] == generations


async def test_a_generation_that_waits_is_there_once() -> None:
    rig = Rig()
    rig.awaits_drafts = True
    generation = make_generation()
    for _ in range(5):
        rig.add(generation)
    rig.awaits_drafts = False
    rig.delivery.resume()
    await turns(5)
    assert rig.turns == [[generation]]


async def test_a_generation_that_nobody_wants_is_not_served() -> None:
    rig = Rig()
    rig.awaits_drafts = True
    generation = make_generation()
    rig.add(generation)
    rig.delivery.discard(generation)
    assert rig.delivery.is_idle
    rig.awaits_drafts = False
    rig.delivery.resume()
    await turns(5)
    assert rig.turns == []
