"""A service's metrics, read from its port while it runs."""

import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """All samples of one reading."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def matching(self, name: str, **labels: str) -> Iterator[Sample]:
        """The samples of this name with at least these labels."""
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample

    def total(self, name: str, **labels: str) -> float:
        """The sum of all matching samples; 0 without any."""
        return sum(sample.value for sample in self.matching(name, **labels))

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound."""
        return {
            float(sample.labels["le"]): sample.value for sample in self.matching(f"{name}_bucket")
        }


def read_metrics(address: str) -> Metrics:
    """Reads a metrics port, HOST:PORT; blocks some milliseconds.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    return Metrics(
        [
            Sample(name=sample.name, labels=sample.labels, value=sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    )


def quantile(before: Mapping[float, float], after: Mapping[float, float], q: float) -> float:
    """A quantile of what a histogram counted between two readings of `Metrics.buckets`.

    Interpolates inside a bucket, so it is as exact as the bucket is narrow. The highest bound if it
    lies beyond; 0 if nothing was counted.
    """
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted = q * max(counts.values(), default=0.0)
    lower = below = 0.0
    if not wanted:
        return 0.0
    for bound, count in counts.items():
        if count >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket counts everything")
