"""A collector of OpenTelemetry: a real gRPC server that keeps the spans it gets."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

# Spans come from processes on a machine that may be busy.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSpan:
    """One span, and the service that sent it; times in Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


class Collector(rpc.TraceServiceServicer):
    """Keeps all spans; for any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[CollectedSpan] = []
        # Everything that came, for a search of what must not be there.
        self.received = b""
        self.address = ""

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        spans = [
            _collected(_values(of_resource.resource.attributes)["service.name"], span)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._changed:
            self.received += request.SerializeToString()
            self._spans += spans
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, is_complete: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """All spans, once they are complete."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_complete(self._spans), PATIENCE_S):
                raise AssertionError(f"came: {[(s.service, s.name) for s in self._spans]}")
            return list(self._spans)


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector that listens on 127.0.0.1."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def silent_collector() -> Iterator[str]:
    """The address of a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.message,
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))
