"""The names of all exported metrics, and of those in an expression.

`metric_names.txt` has one line per service and metric: `gateway counter tandem_x_total{label}`.
"""

import functools
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

GOLDEN = Path(__file__).with_name("metric_names.txt")

# Labels that Prometheus adds to every series.
_TARGET_LABELS = frozenset({"job", "instance", "namespace"})
# Prometheus' own series of a target.
_OWN = {"up": frozenset[str]()}
# Labels added by the suffixes of a family's series.
_SUFFIXES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "counter": {"_total": frozenset()},
    "gauge": {"": frozenset()},
    "histogram": {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()},
}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"(?<![\w$:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?")
_BY = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER_NAME = re.compile(r"(\w+)\s*[=!]")


@dataclass(frozen=True, slots=True)
class Selected:
    """A metric in an expression, with the labels of its selector."""

    name: str
    labels: frozenset[str]


def scrape(address: str, service: str) -> set[str]:
    """The golden lines of a running service."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        text = response.read().decode()
    lines = set()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue  # prometheus_client adds these to counters and histograms
        labels: set[str] = set()
        for sample in family.samples:
            labels |= sample.labels.keys() - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        lines.add(f"{service} {family.type} {family.name}{suffix}{{{','.join(sorted(labels))}}}")
    return lines


@functools.cache
def exported() -> dict[str, frozenset[str]]:
    """The names of all series of a scrape, with their labels."""
    found: dict[str, frozenset[str]] = {}
    for line in GOLDEN.read_text().splitlines():
        _, kind, metric = line.split(" ", 2)
        name, _, labels = metric.rstrip("}").partition("{")
        own = frozenset(filter(None, labels.split(",")))
        for suffix, added in _SUFFIXES[kind].items():
            series = name if name.endswith(suffix) else name + suffix
            found[series] = found.get(series, frozenset()) | own | added
    return found


def selected(expression: str) -> list[Selected]:
    """The metrics of a PromQL expression: Tandem's, a process's, and `up`."""
    without_strings = _STRING.sub('""', expression)
    return [
        Selected(name, frozenset(_MATCHER_NAME.findall(matchers)))
        for name, matchers in _NAME.findall(without_strings)
        if name.startswith(("tandem_", "tandem:", "process_")) or name == "up"
    ]


def grouped(expression: str) -> set[str]:
    """The labels by which an expression groups or joins."""
    lists = _BY.findall(_STRING.sub('""', expression))
    return {label.strip() for one in lists for label in one.split(",") if label.strip()}


def check(expression: str, recorded: Mapping[str, frozenset[str]]) -> None:
    """Fails unless every metric and label of the expression exists.

    Args:
        expression: PromQL.
        recorded: the labels of the series that recording rules make.
    """
    known = {**exported(), **recorded, **_OWN}
    metrics = selected(expression)
    assert metrics, f"no metric in {expression}"
    labels: set[str] = set()
    for metric in metrics:
        assert metric.name in known, f"{metric.name} is not exported: {expression}"
        own = known[metric.name] | _TARGET_LABELS
        assert metric.labels <= own, f"{metric.name} has no {metric.labels - own}: {expression}"
        labels |= own
    assert grouped(expression) <= labels, f"{grouped(expression) - labels}: {expression}"
