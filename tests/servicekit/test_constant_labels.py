"""Metrics of a process that all have the same labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from servicekit.telemetry.constant_labels import ConstantLabels
from servicekit.telemetry.metrics import Exposition
from servicekit.telemetry.tally_histogram import TallyHistogram

NAME = 'a "strange" \\ näme'


def test_every_sample_has_the_labels_beside_its_own() -> None:
    registry = CollectorRegistry()
    labelled = ConstantLabels(registry, {"model": NAME})
    Counter("eggs", "Eggs.", ["colour"], registry=labelled).labels("blue").inc(3)
    TallyHistogram("depth", "Drafts.", bounds=(1, 2), registry=labelled).observe(2)
    Gauge("plain", "Of the process.", registry=registry).set(1)
    samples = {
        (sample.name, sample.labels.get("le", "")): (sample.labels, sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    expected = {
        ("eggs_total", ""): ({"colour": "blue", "model": NAME}, 3),
        ("depth_bucket", "2.0"): ({"le": "2.0", "model": NAME}, 1),
        ("depth_count", ""): ({"model": NAME}, 1),
        ("plain", ""): ({}, 1),
    }
    assert {key: samples[key] for key in expected} == expected


def test_one_that_cannot_be_read_is_left_out_alone() -> None:
    registry = CollectorRegistry()
    labelled = ConstantLabels(registry, {"model": NAME})

    def fail() -> float:
        raise RuntimeError

    Gauge("broken", "Broken.", registry=labelled).set_function(fail)
    Gauge("whole", "Whole.", registry=labelled)
    assert [family.name for family in Exposition(registry).collect()] == ["whole"]
