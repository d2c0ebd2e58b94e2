"""Processes trace where the standard variables say so, and end whatever the collector does."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from servicekit.config import ConfigError
from servicekit.telemetry.spans import Spans
from servicekit.telemetry.trace_context import (
    bind_trace_parent,
    caller_trace_parent,
    is_trace_parent,
)
from servicekit.telemetry.tracing import tracing

REPOSITORY = Path(__file__).resolve().parents[2]
ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ON, "OTEL_SDK_DISABLED": "True"},
        {**ON, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off_by_default_and_can_be_switched_off(variables: dict[str, str]) -> None:
    with tracing("test", variables) as spans:
        assert spans is None


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
)
def test_it_is_on_where_a_collector_is_named(variable: str) -> None:
    with tracing("test", {variable: "http://127.0.0.1:1"}) as spans:
        assert spans is not None
        assert spans.begin("work").is_recording()


def test_a_protocol_that_is_not_supported_is_named() -> None:
    variables = {**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: http/protobuf"):
        tracing("test", variables).__enter__()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"'tandem-serve\[test,otel\]'"):
        tracing("test", ON).__enter__()


def test_a_process_that_does_not_trace_imports_no_opentelemetry() -> None:
    script = (
        "import sys, gateway.__main__, drafter.history_spans\n"
        "from servicekit.telemetry.tracing import tracing\n"
        "with tracing('gateway', {}): pass\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ran.stdout.strip() == "[]"


class HangingExporter(SpanExporter):
    """Sends nothing until it is shut down, as to a collector that does not answer."""

    def __init__(self) -> None:
        self.is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_shut_down.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.is_shut_down.set()


# Unbounded, OpenTelemetry would wait for 30 s.
@pytest.mark.timeout(25)
def test_the_last_spans_are_sent_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda: exporter)
    with tracing("test", ON) as spans:
        assert spans is not None
        spans.begin("work").end()
    assert [each.name for each in exporter.get_finished_spans()] == ["work"]


def test_its_end_does_not_wait_for_a_collector_that_hangs() -> None:
    exporter = HangingExporter()
    spans = Spans(service="test", version="1", exporter=exporter)
    spans.begin("work").end()
    spans.stop()
    assert exporter.is_shut_down.is_set()


def test_a_span_that_its_caller_does_not_sample_is_passed_on_as_such() -> None:
    exporter = HangingExporter()
    exporter.shutdown()
    spans = Spans(service="test", version="1", exporter=exporter)
    unsampled = f"{TRACE_PARENT[:-2]}00"
    span = spans.begin("work", unsampled)
    assert not span.is_recording()
    passed_on = spans.trace_parent(span)
    assert (passed_on[:36], passed_on[-3:]) == (unsampled[:36], "-00")
    spans.stop()


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (TRACE_PARENT, True),
        (f"{TRACE_PARENT[:-2]}00", True),
        ("", False),
        (TRACE_PARENT.upper(), False),
        (TRACE_PARENT[:-1], False),
        (f"{TRACE_PARENT}-", False),
        (f"{TRACE_PARENT}\n", False),
        (f"ff{TRACE_PARENT[2:]}", False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        (TRACE_PARENT.replace("1", "\N{ARABIC-INDIC DIGIT ONE}"), False),
        (TRACE_PARENT * 10_000, False),
    ],
)
def test_what_names_a_span(text: str, is_valid: bool) -> None:
    assert is_trace_parent(text) == is_valid
    bind_trace_parent(text)
    assert caller_trace_parent() == (text if is_valid else "")
