"""Medians with intervals, and quantiles of histograms, against brute force."""

import random
import statistics

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from benchmarks.metrics import Window, read_metrics
from benchmarks.ratios import interval, median_interval, median_ratio, ratios


def test_ratios_are_those_of_each_round() -> None:
    assert ratios([2, 9, 8], [1, 3, 2]) == [2, 3, 4]
    assert median_ratio([2, 9, 8], [1, 3, 2]) == 3


def test_the_interval_covers_the_true_median_in_nineteen_of_twenty_samples() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(60):
        found = median_interval([draw.gauss(10, 1) for _ in range(25)])
        covered += found.low <= 10 <= found.high
    assert 52 <= covered <= 60


def test_the_interval_narrows_with_more_rounds() -> None:
    draw = random.Random(1)
    values = [draw.gauss(10, 1) for _ in range(200)]
    assert median_interval(values).half_width < median_interval(values[:10]).half_width / 2
    assert median_interval([3.0] * 5).half_width == 0


def test_a_statistic_of_two_columns_keeps_their_rounds_together() -> None:
    above, below = [1.0, 10.0, 100.0], [2.0, 20.0, 200.0]
    found = interval(
        lambda rounds: statistics.mean(above[i] / below[i] for i in rounds), len(above)
    )
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)


def test_a_quantile_counts_what_came_between_two_readings() -> None:
    draw = random.Random(1)
    registry = CollectorRegistry()
    bounds = [i / 100 for i in range(1, 101)]
    histogram = Histogram("hop", "Hops.", buckets=bounds, registry=registry)
    Counter("waits", "Waits.", ["outcome"], registry=registry).labels("paid").inc(3)
    for _ in range(1000):
        histogram.observe(0.99)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        address = f"127.0.0.1:{server.server_port}"
        before = read_metrics(address)
        values = [draw.random() for _ in range(2000)]
        for value in values:
            histogram.observe(value)
        after = read_metrics(address)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    cuts = statistics.quantiles(values, n=100)
    for percent in (10, 50, 99):
        found = Window(old=before, new=after).quantile(percent / 100, "hop")
        assert found == pytest.approx(cuts[percent - 1], abs=0.01)
    assert after.total("waits_total", outcome="paid") == 3
    assert after.total("waits_total", outcome="vain") == 0
