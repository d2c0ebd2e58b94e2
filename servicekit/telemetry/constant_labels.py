"""Labels that all metrics of a process have, such as the model that it serves."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector


class ConstantLabels(CollectorRegistry):
    """Registers metrics in another registry, whose scrapes show them with these labels, too.

    Each metric is registered on its own: one that cannot be read is left out alone.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._registry = registry
        self._labels = dict(labels)

    def register(self, collector: Collector) -> None:
        self._registry.register(_Labelled(collector, self._labels))


class _Labelled(Collector):
    def __init__(self, collector: Collector, labels: dict[str, str]) -> None:
        self._collector = collector
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """The names, by which a registry refuses a second metric of one name."""
        describe = getattr(self._collector, "describe", None)
        return () if describe is None else describe()

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in family.samples
            ]
            yield family
