"""A service's metrics, read from its port while it runs."""

import urllib.request
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

# A busy machine may take its time.
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of one service at one moment."""

    families: tuple[Metric, ...]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 if there is none."""
        return sum(
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def increase(self, before: "Snapshot", name: str, **labels: str) -> float:
        """By how much a counter grew since then; one that was reset has counted from 0."""
        old, new = before.total(name, **labels), self.total(name, **labels)
        return new - old if new >= old else new


def read_metrics(address: str) -> Snapshot:
    """Reads a metrics port, HOST:PORT; blocks some milliseconds.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        return Snapshot(tuple(text_string_to_metric_families(response.read().decode())))
