"""A service's metrics, read from its port while it runs, and compared over a window of time."""

import itertools
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# On a busy machine a service may take its time.
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All samples of one service at one moment."""

    taken_at_s: float
    """By this process's monotonic clock."""
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)
    """By name: labels and value of each."""

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there is none."""
        return sum(
            value for found, value in self.samples.get(name, ()) if labels.items() <= found.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened between two snapshots of one service."""

    old: Snapshot
    new: Snapshot

    def increase(self, name: str, **labels: str) -> float:
        """Of a counter; one that was reset has counted from 0."""
        before, after = self.old.total(name, **labels), self.new.total(name, **labels)
        return after - before if after >= before else after

    def quantile(self, q: float, histogram: str) -> float | None:
        """Of the values observed in the window, interpolated within a bucket; None without any."""
        buckets = f"{histogram}_bucket"
        bounds = sorted(
            {(float(labels["le"]), labels["le"]) for labels, _ in self.new.samples.get(buckets, ())}
        )
        counts = [self.increase(buckets, le=text) for _, text in bounds]
        if not counts or not counts[-1]:
            return None
        wanted = q * counts[-1]
        lower = 0.0
        for (bound, _), (before, count) in zip(
            bounds, itertools.pairwise([0.0, *counts]), strict=True
        ):
            if count >= wanted and count > before:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (wanted - before) / (count - before)
            lower = bound
        return lower


def read_metrics(address: str) -> Snapshot:
    """Reads a metrics port, HOST:PORT; blocks some milliseconds.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Snapshot(taken_at_s=time.monotonic(), samples=samples)
