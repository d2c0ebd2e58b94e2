"""A histogram for many small whole numbers at a time.

prometheus_client's own takes one observation per call, with a lock and some microseconds each. That
is too much for one figure per sequence and step; here a step's figures cost one lock together.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TallyHistogram(Collector):
    """A histogram metric without labels, in the registry that it is given. For any thread."""

    def __init__(
        self, name: str, documentation: str, *, bounds: Sequence[int], registry: CollectorRegistry
    ) -> None:
        """Begins at 0.

        Args:
            name: without the suffixes that scrapes show.
            documentation: the help text.
            bounds: the buckets' inclusive upper bounds, ascending; one without bound is added.
            registry: where it is scraped from.
        """
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        registry.register(self)

    def observe_all(self, values: Iterable[int]) -> None:
        """Counts the values, 0 or more each."""
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
