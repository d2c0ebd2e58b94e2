"""The grpc.health.v1 service.

Owns whether this process says that it serves, and that it lives. Knows nothing of what either
takes: the server tells it. Specification: https://github.com/grpc/grpc/blob/master/doc/health-checking.md

grpcio-health-checking brings the messages and a servicer; this one replaces its servicer, in
which a watcher that leaves takes the other watchers' notifications with it, transitions are
coroutines, and no watch ever ends, so that every watching client holds up the stop of the server
for the whole grace period.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"

#: What liveness probes ask for: NOT_SERVING when nothing but a restart would help. Unlike the rest
#: it says SERVING from the start, also while the process loads, is overloaded or drains.
LIVENESS_NAME = "tandem.liveness"

_Context = grpc.aio.ServicerContext[Any, Any]


# Derived, so that methods which later versions of the protocol add answer UNIMPLEMENTED.
class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for the whole server ("") and for each of its services, all in one state, and for
    `LIVENESS_NAME` in its own.

    Owned by the event loop's thread; starts NOT_SERVING, and alive.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._known = frozenset({"", LIVENESS_NAME, *service_names})
        self._serving = False
        self._alive = True
        self._retired = False
        self._closed = False
        # Set, and replaced by a new one, at every transition: all watchers wake up at once.
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """What a check would be told."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Tells all that ask, and all that watch; after `retire`, SERVING is not said again."""
        serving = serving and not self._retired
        if serving != self._serving:
            self._serving = serving
            self._wake_watchers()

    def set_alive(self, alive: bool) -> None:
        """What liveness probes are told; readiness is not touched."""
        if alive != self._alive:
            self._alive = alive
            self._wake_watchers()

    def retire(self) -> None:
        """Says NOT_SERVING for good."""
        self._retired = True
        self.set_serving(False)

    def close(self) -> None:
        """Says NOT_SERVING for good and ends every watch, so that the server can stop."""
        self.retire()
        self._closed = True
        self._wake_watchers()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers the service; before the server starts."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The state of one service."""
        if request.service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state of one service now and after every change, until the server stops."""
        last_status = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last_status:
                last_status = status
                yield health_pb2.HealthCheckResponse(status=status)
            elif self._closed:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        response = health_pb2.HealthCheckResponse
        if service not in self._known:
            return cast(int, response.SERVICE_UNKNOWN)
        state = self._alive if service == LIVENESS_NAME else self._serving
        return cast(int, response.SERVING if state else response.NOT_SERVING)

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
