"""Metrics of calls: `tandem_rpc_requests{service, method, code}` and
`tandem_rpc_duration_seconds{service, method}`.
"""

import asyncio
import time
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from servicekit.interceptors.base import (
    CODE_BY_NUMBER,
    CallFailedError,
    CallInterceptor,
    Context,
    Handler,
    behaviour_of,
    rebuild,
    time_left_s,
)

# From a cheap unary call to a stream that lives as long as its peer.
_DURATION_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
    1800, 7200,
)  # fmt: skip


class MetricsInterceptor(CallInterceptor):
    """Counts and times calls when they end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._requests = Counter(
            "tandem_rpc_requests",
            "Calls that ended, by gRPC status code.",
            ["service", "method", "code"],
            registry=registry,
        )
        self._duration = Histogram(
            "tandem_rpc_duration_seconds",
            "Time from a call's first message, or its start if it is a stream, to its end, in "
            "seconds.",
            ["service", "method"],
            registry=registry,
            buckets=_DURATION_BUCKETS_S,
        )

    def on_unknown_method(self) -> None:
        # Not under the name that the caller sent: callers can invent any number of names.
        self._requests.labels("unknown", "unknown", grpc.StatusCode.UNIMPLEMENTED.name).inc()

    def wrap(self, handler: Handler, method: str) -> Handler:
        inner = behaviour_of(handler)
        service, _, name = method.removeprefix("/").rpartition("/")
        duration = self._duration.labels(service, name)

        async def with_metrics(request: Any, context: Context) -> Any:
            start_s = time.perf_counter()
            left_s = time_left_s(context)
            code = grpc.StatusCode.UNKNOWN
            try:
                response = await inner(request, context)
                code = _code(context)
                return response
            except CallFailedError as error:
                code = CODE_BY_NUMBER[error.status.code]
                raise
            except grpc.aio.AbortError:
                code = _code(context)
                raise
            except (asyncio.CancelledError, grpc.aio.BaseError):
                # The caller went away; BaseError: while a response was being written.
                is_late = left_s is not None and time.perf_counter() - start_s >= left_s
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
                raise
            finally:
                duration.observe(time.perf_counter() - start_s)
                self._requests.labels(service, name, code.name).inc()

        return rebuild(handler, with_metrics, handler.request_deserializer)


def _code(context: Context) -> grpc.StatusCode:
    code: object = context.code()  # None unless the handler set one; gRPC accepts numbers too
    if code is None:
        return grpc.StatusCode.OK
    if isinstance(code, grpc.StatusCode):
        return code
    return CODE_BY_NUMBER.get(cast(int, code), grpc.StatusCode.UNKNOWN)
