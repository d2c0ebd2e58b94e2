"""A histogram that observes many small integers at once.

prometheus_client's own observes one value per call, with a lock and some microseconds each. That is
too slow for one value per sequence and step; here all values of a step share one lock.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TallyHistogram(Collector):
    """A histogram metric without labels. For any thread."""

    def __init__(
        self, name: str, documentation: str, *, bounds: Sequence[int], registry: CollectorRegistry
    ) -> None:
        """Registers the metric.

        Args:
            name: without the suffixes that scrapes show.
            documentation: the help text.
            bounds: inclusive upper bounds of the buckets, ascending; +Inf is added.
            registry: where it is registered.
        """
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        registry.register(self)

    def observe_all(self, values: Iterable[int]) -> None:
        """Counts the values, each 0 or more."""
        with self._lock:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
                self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            counts, total = tuple(self._counts), self._sum
        buckets: list[tuple[str, float]] = []
        cumulative = 0
        for bound, count in zip((*self._bounds, None), counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), cumulative))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, sum_value=total)
