"""What is recorded of histories; `tests/integration/test_spans.py` has whole traces."""

import itertools
import time

import numpy as np
import opentelemetry.sdk.trace
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from drafter.history.history import SequenceDelta
from drafter.history.store import HistoryStore
from drafter.history_spans import HistorySpans
from servicekit.telemetry.spans import Spans
from tests.drafter.history.test_history_store import LIMITS
from tests.drafter.texts import KMP

CALLER = f"00-{1:032x}-{1:016x}-01"


def test_a_wall_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(time.time_ns(), -(3600 * 10**9))
    for module in (time, opentelemetry.sdk.trace):
        monkeypatch.setattr(module, "time_ns", lambda: next(readings))
    kept = InMemorySpanExporter()
    spans = Spans(service="test", version="0", exporter=kept)
    store = HistoryStore(
        LIMITS, clock=time.monotonic, on_eviction=lambda reason: None, watcher=HistorySpans(spans)
    )
    store.append(
        SequenceDelta(
            sequence_id="a",
            base_length=0,
            token_ids=np.array([1, 2, 3], dtype=np.uint32),
            params=KMP,
            trace_parent=CALLER,
        )
    )
    store.release("a")
    monkeypatch.undo()
    spans.stop()
    (span,) = kept.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["tandem.tokens"] == 3
    assert 0 < (span.end_time or 0) - (span.start_time or 0) < 60 * 10**9
