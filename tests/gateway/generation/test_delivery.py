"""Clients are served soon, few at a time, and not for every step."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.generation.delivery import (
    CLIENTS_PER_ITERATION,
    MESSAGES_PER_MEASUREMENT,
    Delivery,
)
from gateway.generation.generation import Generation
from tandem.values import FinishReason
from tests.gateway.factories import append_step, make_generation
from tests.gateway.text.test_tokenizer import BUNDLED

# Nothing that gathers is served within a test.
LONG_S = 600.0


class RecordedDelivery:
    """A delivery to `num_streams`, whose messages take no time until a test says otherwise, and
    what it published.
    """

    def __init__(self, *, interval_s: float = 0.0, num_streams: int = 1) -> None:
        self.batches: list[list[Generation]] = []
        self.published = asyncio.Event()
        self.message_s = 0.0
        self._thread_s = 0.0
        self.num_streams = num_streams
        self.delivery = Delivery(
            self.publish,
            interval_s=interval_s,
            num_streams=lambda: self.num_streams,
            thread_time=lambda: self._thread_s,
        )

    def publish(self, generations: Sequence[Generation]) -> None:
        self._thread_s += self.message_s * len(generations)
        self.batches.append(list(generations))
        for generation in generations:
            generation.publish()
        self.published.set()

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            self.delivery.add(generation)


async def iterate(count: int) -> None:
    """Lets the event loop run through some iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_many_clients_are_served_over_several_iterations_of_the_loop() -> None:
    recorded = RecordedDelivery()
    generations = [make_generation() for _ in range(3 * CLIENTS_PER_ITERATION - 1)]
    recorded.add(*generations)
    for num_batches in (1, 2, 3, 3):
        await iterate(1)
        assert len(recorded.batches) == num_batches
    assert [len(batch) for batch in recorded.batches] == [16, 16, 15]
    assert [generation for batch in recorded.batches for generation in batch] == generations


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

    recorded.delivery = Delivery(fail_once, interval_s=0.0, num_streams=lambda: 1)
    recorded.add(*(make_generation() for _ in range(CLIENTS_PER_ITERATION + 1)))
    await iterate(3)
    assert [len(batch) for batch in recorded.batches] == [CLIENTS_PER_ITERATION, 1]
    assert len(failures) == 1


async def make_started(recorded: RecordedDelivery, **fields: Any) -> Generation:
    """A generation whose first token was served."""
    generation = make_generation(**fields)
    append_step(generation, [5])
    recorded.add(generation)
    await iterate(1)
    assert recorded.batches.pop() == [generation], "the first token does not wait"
    return generation


async def test_a_stream_that_was_served_gathers_tokens_until_its_last_one() -> None:
    recorded = RecordedDelivery(interval_s=LONG_S)
    generation = await make_started(recorded)
    for token_id in (6, 7):
        append_step(generation, [token_id])
        recorded.add(generation)
        await iterate(3)
    assert recorded.batches == []
    assert not recorded.delivery.is_idle
    append_step(generation, [8], finish=FinishReason.STOP)
    recorded.add(generation)
    await iterate(3)
    assert recorded.batches == [[generation]]
    assert recorded.delivery.is_idle


async def test_what_was_gathered_is_served_together_once() -> None:
    recorded = RecordedDelivery(interval_s=0.02)
    first, second = await make_started(recorded), await make_started(recorded)
    for _ in range(3):
        for generation in (first, second):
            append_step(generation, [6])
            recorded.add(generation)
    recorded.published.clear()
    async with asyncio.timeout(10):
        await recorded.published.wait()
    assert recorded.delivery.is_idle
    assert recorded.batches == [[first, second]]
    assert first.token_ids[-4:] == [5, 6, 6, 6]


async def measure(recorded: RecordedDelivery, *, message_s: float) -> None:
    """Serves clients until the time of a message is measured anew."""
    recorded.message_s = message_s
    # Two measurements: the first may have messages from before.
    recorded.add(*(make_generation() for _ in range(2 * MESSAGES_PER_MEASUREMENT)))
    await iterate(2 * MESSAGES_PER_MEASUREMENT // CLIENTS_PER_ITERATION)
    assert recorded.delivery.is_idle
    recorded.batches.clear()


async def is_served_after(recorded: RecordedDelivery, passed_s: float, **fields: Any) -> bool:
    """Whether a started stream is served that gets a token this long after its last message."""
    generation = await make_started(recorded, **fields)
    generation.served_at_s -= passed_s
    append_step(generation, [6])
    recorded.add(generation)
    await iterate(1)
    is_served = recorded.batches == [[generation]]
    recorded.batches.clear()
    recorded.delivery.discard(generation)
    return is_served


async def test_one_message_to_each_stream_takes_half_of_the_interval() -> None:
    recorded = RecordedDelivery(interval_s=0.005, num_streams=300_000)
    await measure(recorded, message_s=100e-6)
    assert not await is_served_after(recorded, 55)
    assert await is_served_after(recorded, 61)
    # Streams that are gone count no longer.
    recorded.num_streams = 30_000
    await make_started(recorded)
    assert await is_served_after(recorded, 6.1)
    await measure(recorded, message_s=1e-6)
    assert await is_served_after(recorded, 0.1)


@pytest.mark.parametrize("fields", [{"stop_sequences": ["end"]}, {"trace": True}])
async def test_a_stop_string_or_a_trace_does_not_wait(fields: dict[str, Any]) -> None:
    recorded = RecordedDelivery(interval_s=LONG_S)
    generation = await make_started(recorded, tokenizer=BUNDLED, **fields)
    append_step(generation, [6])
    recorded.add(generation)
    await iterate(1)
    assert recorded.batches == [[generation]]
