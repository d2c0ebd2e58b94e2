"""Spans of OpenTelemetry, and their way to a collector (OTLP over gRPC).

Owns the library's set-up, and what it takes from a caller and gives to a callee. Imported only by
processes that trace (`tracing.py`). Spans hold identifiers and numbers, never the content
of a request.

A collector that is slow or gone harms nobody: ended spans wait in a bounded queue
(`OTEL_BSP_MAX_QUEUE_SIZE`), from which a thread sends them. Beyond it they are dropped.
"""

import threading
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from servicekit.telemetry.trace_context import TRACE_PARENT_KEY

Attributes = Mapping[str, str | int | float | Sequence[str]]

# How long the end of a process waits for its last spans to be sent.
_STOP_TIMEOUT_S = 2.0


class Spans:
    """Makes the spans of one service. For any thread; nothing here blocks but `stop`."""

    def __init__(self, *, service: str, version: str, exporter: SpanExporter) -> None:
        """Begins without spans.

        Args:
            service: their resource's `service.name`.
            version: of the service.
            exporter: sends them.
        """
        self._exporter = exporter
        self._processor = BatchSpanProcessor(exporter)
        # The process's end must not wait for the collector.
        provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: service, SERVICE_VERSION: version}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tandem", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, trace_parent: str = "", *, at_ns: int | None = None) -> trace.Span:
        """Begins the work that a caller requested.

        Args:
            name: of the work.
            trace_parent: the caller's span. Without one a trace begins, if the sampler wants it.
            at_ns: when it began, in Unix nanoseconds; None: now.

        Returns:
            A span that records nothing if the sampler, or the caller, does not want it.
        """
        parent = self._propagator.extract({TRACE_PARENT_KEY: trace_parent}, Context())
        return self._tracer.start_span(name, parent, kind=trace.SpanKind.SERVER, start_time=at_ns)

    def add_part(
        self,
        name: str,
        whole: trace.Span,
        *,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
    ) -> None:
        """Adds a part of a span, once that part is over; times in Unix nanoseconds."""
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(whole, Context()),
            attributes=attributes,
            start_time=start_ns,
        )
        span.end(end_ns)

    def trace_parent(self, span: trace.Span) -> str:
        """For callees, also where the span records nothing: they then record nothing, too."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier.get(TRACE_PARENT_KEY, "")

    @staticmethod
    def trace_id(span: trace.Span) -> str:
        """The id of a span's trace, as trace viewers show it."""
        return trace.format_trace_id(span.get_span_context().trace_id)

    @staticmethod
    def fail(span: trace.Span, code: str) -> None:
        """Marks a span as failed; the code is a gRPC status, never a message."""
        span.set_status(trace.StatusCode.ERROR, code)

    def stop(self) -> None:
        """Sends the last spans; after `_STOP_TIMEOUT_S` the rest is dropped."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        sending.join(_STOP_TIMEOUT_S)
        if sending.is_alive():
            # Ends the call that waits for the collector, and refuses further ones.
            self._exporter.shutdown()
            sending.join(_STOP_TIMEOUT_S)
