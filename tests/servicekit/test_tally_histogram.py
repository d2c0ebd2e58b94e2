"""A histogram that is observed in every step is scraped as prometheus_client's own would be."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from servicekit.telemetry.tally_histogram import TallyHistogram

BOUNDS = (0, 1, 2, 7, 15)


@given(st.lists(st.lists(st.integers(0, 20))))
def test_it_is_scraped_as_the_librarys_own(observed: list[list[int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram("depth", "Drafts.", bounds=BOUNDS, registry=ours)
    oracle = Histogram("depth", "Drafts.", buckets=BOUNDS, registry=theirs)
    for values in observed:
        tally.observe_all(values)
        for value in values:
            oracle.observe(value)
    for line in generate_latest(ours).decode().splitlines():
        if line.startswith("#"):
            assert line in generate_latest(theirs).decode()
            continue
        sample, count = line.rsplit(" ", 1)
        name, _, label = sample.partition("{")
        labels = {"le": label[4:-2]} if label else {}
        assert theirs.get_sample_value(name, labels) == float(count), line
    assert ours.get_sample_value("depth_count") == sum(map(len, observed))


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(("read", "write")))))
def test_fractions_are_counted_by_label(observed: list[tuple[float, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    phases = {"label": "phase", "label_values": ("read", "write")}
    tally = TallyHistogram("time", "Time.", bounds=BOUNDS, registry=ours, **phases)  # type: ignore[arg-type]
    oracle = Histogram("time", "Time.", ["phase"], buckets=BOUNDS, registry=theirs)
    for phase in ("read", "write"):
        oracle.labels(phase)
    for value, phase in observed:
        tally.observe(value, phase)
        oracle.labels(phase).observe(value)
    for phase in ("read", "write"):
        for name in ("time_count", "time_sum"):
            found = ours.get_sample_value(name, {"phase": phase})
            assert found == theirs.get_sample_value(name, {"phase": phase}), name
        for bound in ("0.0", "2.0", "15.0", "+Inf"):
            labels = {"phase": phase, "le": bound}
            found = ours.get_sample_value("time_bucket", labels)
            assert found == theirs.get_sample_value("time_bucket", labels), bound
