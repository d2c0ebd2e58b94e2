"""Histograms that are observed in every step.

prometheus_client's own takes some microseconds per value: it looks a label up, walks the buckets,
and locks twice. That is too slow for several values per sequence and step; here a value costs a
search in a tuple and two additions, and many values at once share one lock.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class _Tally:
    """The counts of one series."""

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets
        self.sum = 0.0


class TallyHistogram(Collector):
    """A histogram metric with at most one label. For any thread."""

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
        label_values: Sequence[str] = ("",),
    ) -> None:
        """Registers the metric.

        Args:
            name: without the suffixes that scrapes show.
            documentation: the help text.
            bounds: inclusive upper bounds of the buckets, ascending; +Inf is added.
            registry: where it is registered.
            label: its name; "": no label.
            label_values: all of them.
        """
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._label = label
        self._lock = threading.Lock()
        self._tallies = {value: _Tally(len(bounds) + 1) for value in label_values}
        registry.register(self)

    def observe(self, value: float, label_value: str = "") -> None:
        """Counts a value, 0 or more."""
        with self._lock:
            tally = self._tallies[label_value]
            tally.counts[bisect_left(self._bounds, value)] += 1
            tally.sum += value

    def observe_all(self, values: Iterable[float], label_value: str = "") -> None:
        """Counts the values, each 0 or more."""
        with self._lock:
            tally = self._tallies[label_value]
            for value in values:
                tally.counts[bisect_left(self._bounds, value)] += 1
                tally.sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        with self._lock:
            series = [(v, tuple(tally.counts), tally.sum) for v, tally in self._tallies.items()]
        labels = [self._label] if self._label else []
        family = HistogramMetricFamily(self._name, self._documentation, labels=labels)
        for label_value, counts, total in series:
            buckets: list[tuple[str, float]] = []
            cumulative = 0
            for bound, count in zip((*self._bounds, None), counts, strict=True):
                cumulative += count
                buckets.append(("+Inf" if bound is None else str(float(bound)), cumulative))
            family.add_metric([label_value] if labels else [], buckets, sum_value=total)
        yield family
