"""The grpc.health.v1 service.

Owns the answers: whether this process serves, and whether it lives. The server decides both.
Specification: https://github.com/grpc/grpc/blob/master/doc/health-checking.md

grpcio-health-checking has the messages and a servicer. This module replaces the servicer because
there a watcher that leaves can make other watchers miss notifications, transitions are coroutines,
and watches never end, so that each of them delays the server's stop by the whole grace period.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"

#: The service that liveness probes ask for. It is NOT_SERVING only when the process must be
#: restarted; it is SERVING also while the process loads, is overloaded or drains.
LIVENESS_NAME = "tandem.liveness"

_Context = grpc.aio.ServicerContext[Any, Any]


# Derived, so that methods which later versions of the protocol add answer UNIMPLEMENTED.
class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One state for the whole server ("") and all of its services, another for `LIVENESS_NAME`.

    Owned by the event loop's thread; starts NOT_SERVING, and alive.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._known = frozenset({"", LIVENESS_NAME, *service_names})
        self._serving = False
        self._alive = True
        self._retired = False
        self._closed = False
        # Set and replaced at every transition, which wakes up all watchers at once.
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether a check is answered with SERVING."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Sets the answer to checks and notifies watchers; SERVING is ignored after `retire`."""
        serving = serving and not self._retired
        if serving != self._serving:
            self._serving = serving
            self._wake_watchers()

    def set_alive(self, alive: bool) -> None:
        """Sets the answer to liveness probes; does not change readiness."""
        if alive != self._alive:
            self._alive = alive
            self._wake_watchers()

    def retire(self) -> None:
        """Answers NOT_SERVING from now on."""
        self._retired = True
        self.set_serving(False)

    def close(self) -> None:
        """Answers NOT_SERVING from now on and ends every watch, so that the server can stop."""
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
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
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
