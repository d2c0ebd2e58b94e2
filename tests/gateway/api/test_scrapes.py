"""However many scrapes come, they cost little time."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.api.scrapes import Scrapes
from servicekit.telemetry.metrics import Exposition
from tests.gateway.running_gateway import until

RENDER_S = 0.02


class SlowCollector(Collector):
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def collect(self) -> Iterator[Metric]:
        self.num_reads += 1
        ends_s = time.thread_time() + RENDER_S
        while time.thread_time() < ends_s:
            pass
        yield GaugeMetricFamily("reads", "Reads.", value=self.num_reads)


@pytest.fixture
def collector() -> SlowCollector:
    return SlowCollector()


@pytest.fixture
def scrapes(collector: SlowCollector) -> Scrapes:
    registry = CollectorRegistry()
    registry.register(collector)
    collector.num_reads = 0
    return Scrapes(Exposition(registry))


async def test_those_who_ask_before_a_text_is_begun_share_it(
    scrapes: Scrapes, collector: SlowCollector
) -> None:
    answers = await asyncio.gather(*[scrapes.answer("") for _ in range(50)])
    assert collector.num_reads == 1
    assert set(answers) == {answers[0]}
    assert b"reads 1.0" in answers[0][0]


async def test_who_asks_later_gets_a_later_text(scrapes: Scrapes, collector: SlowCollector) -> None:
    first = asyncio.create_task(scrapes.answer(""))
    await until(lambda: bool(collector.num_reads))
    second = asyncio.create_task(scrapes.answer(""))
    assert b"reads 1.0" in (await first)[0]
    assert b"reads 2.0" in (await second)[0]


async def test_nothing_is_rendered_most_of_the_time(
    scrapes: Scrapes, collector: SlowCollector
) -> None:
    began_s = time.monotonic()
    for _ in range(4):
        await scrapes.answer("")
    assert collector.num_reads == 4
    assert time.monotonic() - began_s > 3 * 10 * RENDER_S
