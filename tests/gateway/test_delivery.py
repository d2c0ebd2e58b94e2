"""Clients are served after hints, but soon, and few at a time."""

import asyncio
from collections.abc import Sequence

from gateway.generation.delivery import CLIENTS_PER_ITERATION, Delivery
from gateway.generation.generation import Generation
from tests.gateway.factories import make_generation

LONG_S = 1000.0


class RecordedDelivery:
    """A delivery, what it published and whether drafts are awaited."""

    def __init__(self, max_delay_s: float = LONG_S) -> None:
        self.awaits_drafts = False
        self.batches: list[list[Generation]] = []
        self.published = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.delivery = Delivery(
            publish=self.publish,
            awaits_drafts=lambda: self.awaits_drafts,
            max_delay_s=max_delay_s,
        )

    def publish(self, generations: Sequence[Generation]) -> None:
        self.batches.append(list(generations))
        self.published.set()

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            self.delivery.add(generation, self.loop.time())
        self.delivery.resume()


async def iterate(count: int) -> None:
    """Lets the event loop run through some iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_without_awaited_hints_clients_are_served_in_the_next_iteration() -> None:
    recorded = RecordedDelivery()
    generation = make_generation()
    recorded.add(generation)
    assert recorded.batches == [], "never inside the step itself"
    await iterate(1)
    assert recorded.batches == [[generation]]
    assert recorded.delivery.is_idle


async def test_while_hints_are_awaited_clients_wait() -> None:
    recorded = RecordedDelivery()
    recorded.awaits_drafts = True
    recorded.add(make_generation())
    await iterate(20)
    assert recorded.batches == []
    recorded.awaits_drafts = False
    recorded.delivery.resume()
    assert recorded.batches == [], "after the writer that was woken with the hints"
    await iterate(1)
    assert len(recorded.batches) == 1


async def test_hints_that_do_not_come_delay_clients_for_a_bounded_time() -> None:
    recorded = RecordedDelivery(max_delay_s=0.01)
    recorded.awaits_drafts = True
    recorded.add(make_generation())
    async with asyncio.timeout(60):
        await recorded.published.wait()
    assert recorded.delivery.is_idle


async def test_many_clients_are_served_over_several_iterations_of_the_loop() -> None:
    recorded = RecordedDelivery()
    generations = [make_generation() for _ in range(3 * CLIENTS_PER_ITERATION - 1)]
    recorded.add(*generations)
    await iterate(1)
    assert len(recorded.batches) == 1
    recorded.awaits_drafts = True  # the next step has ended meanwhile: its hints go first
    await iterate(20)
    assert len(recorded.batches) == 1
    recorded.awaits_drafts = False
    recorded.delivery.resume()
    await iterate(20)
    assert [len(batch) for batch in recorded.batches] == [4, 4, 3]
    assert [generation for batch in recorded.batches for generation in batch] == generations


async def test_a_generation_waits_once_however_many_steps_it_gathers() -> None:
    recorded = RecordedDelivery()
    recorded.awaits_drafts = True
    generation = make_generation()
    for _ in range(5):
        recorded.add(generation)
    recorded.awaits_drafts = False
    recorded.delivery.resume()
    await iterate(5)
    assert recorded.batches == [[generation]]


async def test_a_generation_that_nobody_wants_is_not_served() -> None:
    recorded = RecordedDelivery()
    recorded.awaits_drafts = True
    generation = make_generation()
    recorded.add(generation)
    recorded.delivery.discard(generation)
    assert recorded.delivery.is_idle
    recorded.awaits_drafts = False
    recorded.delivery.resume()
    await iterate(5)
    assert recorded.batches == []
