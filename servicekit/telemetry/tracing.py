"""Whether a process traces, by OpenTelemetry's standard variables.

Owns that decision. Off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
names a collector; then OpenTelemetry is imported, which reads its further variables itself.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from servicekit import VERSION
from servicekit.config import ConfigError

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextlib.contextmanager
def tracing(service: str, environ: Mapping[str, str]) -> "Iterator[Spans | None]":
    """What makes a process's spans, until its end; None: it makes none.

    Args:
        service: the spans' `service.name` is `tandem-` and this, unless OTEL_SERVICE_NAME is set.
        environ: the process's variables.

    Raises:
        ConfigError: spans are to be sent, and cannot be.
    """
    if not _is_on(environ):
        yield None
        return
    spans = _start(service, environ)
    try:
        yield spans
    finally:
        spans.stop()


def _start(service: str, environ: Mapping[str, str]) -> "Spans":
    for variable in _PROTOCOLS:
        # Empty is as if it were not set, as for OpenTelemetry.
        if (environ.get(variable) or "grpc") != "grpc":
            raise ConfigError(variable, f"{environ[variable]} is not supported, only grpc")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from servicekit.telemetry.spans import Spans
    except ImportError:
        raise ConfigError(
            next(name for name in _ENDPOINTS if environ.get(name)),
            f"traces need the extra `otel`: pip install 'tandem-serve[{service},otel]'",
        ) from None
    return Spans(
        service=environ.get("OTEL_SERVICE_NAME") or f"tandem-{service}",
        version=VERSION,
        exporter=OTLPSpanExporter(),
    )


def _is_on(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    return any(environ.get(name) for name in _ENDPOINTS)
