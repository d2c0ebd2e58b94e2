"""Clients are served soon, and few at a time."""

import asyncio
from collections.abc import Sequence

from gateway.generation.delivery import CLIENTS_PER_ITERATION, Delivery
from gateway.generation.generation import Generation
from tests.gateway.factories import make_generation


class RecordedDelivery:
    """A delivery, and what it published."""

    def __init__(self) -> None:
        self.batches: list[list[Generation]] = []
        self.delivery = Delivery(self.publish)

    def publish(self, generations: Sequence[Generation]) -> None:
        self.batches.append(list(generations))

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            self.delivery.add(generation)


async def iterate(count: int) -> None:
    """Lets the event loop run through some iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_clients_are_served_in_the_next_iteration() -> None:
    recorded = RecordedDelivery()
    generation = make_generation()
    recorded.add(generation)
    assert recorded.batches == [], "never inside the step itself"
    await iterate(1)
    assert recorded.batches == [[generation]]
    assert recorded.delivery.is_idle


async def test_many_clients_are_served_over_several_iterations_of_the_loop() -> None:
    recorded = RecordedDelivery()
    generations = [make_generation() for _ in range(3 * CLIENTS_PER_ITERATION - 1)]
    recorded.add(*generations)
    for num_batches in (1, 2, 3, 3):
        await iterate(1)
        assert len(recorded.batches) == num_batches
    assert [len(batch) for batch in recorded.batches] == [4, 4, 3]
    assert [generation for batch in recorded.batches for generation in batch] == generations


async def test_a_generation_waits_once_however_many_steps_it_gathers() -> None:
    recorded = RecordedDelivery()
    first, second = make_generation(), make_generation()
    recorded.add(first, second, *[first] * 5)
    await iterate(5)
    assert recorded.batches == [[first, second]]


async def test_a_generation_that_nobody_wants_is_not_served() -> None:
    recorded = RecordedDelivery()
    wanted, unwanted = make_generation(), make_generation()
    recorded.add(wanted, unwanted)
    recorded.delivery.discard(unwanted)
    await iterate(5)
    assert recorded.batches == [[wanted]]
    assert recorded.delivery.is_idle


async def test_the_others_are_served_even_if_some_fail() -> None:
    recorded = RecordedDelivery()
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    publish = recorded.publish

    def fail_once(generations: Sequence[Generation]) -> None:
        publish(generations)
        if len(recorded.batches) == 1:
            raise RuntimeError("cannot be published")

    recorded.delivery = Delivery(fail_once)
    recorded.add(*(make_generation() for _ in range(CLIENTS_PER_ITERATION + 1)))
    await iterate(3)
    assert [len(batch) for batch in recorded.batches] == [CLIENTS_PER_ITERATION, 1]
    assert len(failures) == 1
