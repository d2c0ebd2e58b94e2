"""Bounds on the work of a server: calls in flight, and requests being received.

At most `max_concurrent_calls` run at a time, without health checks. A call of one request is
answered once the request has arrived, which may take `request_timeout_s`. At most
`MAX_RECEIVED_AT_ONCE` requests are received at a time, `MAX_RECEIVED_PER_CONNECTION` of them over
one connection.
"""

import asyncio
import weakref
from typing import Any

import grpc

from servicekit.errors import ErrorTable, MalformedRequestError, RequestError, to_status
from servicekit.interceptors.base import (
    CallFailedError,
    CallInterceptor,
    Context,
    Handler,
    behaviour_of,
    rebuild,
)

#: Requests received at a time, each of up to `MAX_RECEIVE_BYTES`: so the requests that no handler
#: has seen yet hold at most 320 MiB. Further ones wait at their clients, except for what fits a
#: stream's flow-control window.
MAX_RECEIVED_AT_ONCE = 64

#: Of these, over one connection: a client that announces requests and does not send them delays
#: nobody else.
MAX_RECEIVED_PER_CONNECTION = 8

# When a caller that was refused may retry.
_RETRY_AFTER_MS = 1_000

# Health must be answered above all when the server is overloaded.
_UNBOUNDED_SERVICE = "/grpc.health.v1.Health/"


class _TooManyCallsError(RequestError):
    pass


class _LateRequestError(RequestError):
    pass


_ERROR_TABLE: ErrorTable = {
    _TooManyCallsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    _LateRequestError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class BoundsInterceptor(CallInterceptor):
    """Counts the calls, and receives the request of a call that has one.

    gRPC would receive that request before it calls any code of ours, for any number of calls at a
    time. So gRPC is told that every call sends a stream of requests, and the one request is read
    from the stream here, when there is room.
    """

    def __init__(self, max_concurrent_calls: int, request_timeout_s: float) -> None:
        super().__init__()
        self._max_concurrent_calls = max_concurrent_calls
        self._request_timeout_s = request_timeout_s
        self._num_calls = 0
        self._receiving = asyncio.Semaphore(MAX_RECEIVED_AT_ONCE)
        # By connection, while one of its calls holds the semaphore or waits for it.
        self._receiving_by_peer: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    def wrap(self, handler: Handler, method: str) -> Handler:
        if method.startswith(_UNBOUNDED_SERVICE):
            return handler
        inner = behaviour_of(handler)
        has_one_request = not handler.request_streaming

        async def with_bounds(request: Any, context: Context) -> Any:
            if self._num_calls >= self._max_concurrent_calls:
                raise _call_failed(
                    _TooManyCallsError(
                        f"{self._num_calls} calls are in flight, the maximum",
                        retry_after_ms=_RETRY_AFTER_MS,
                    )
                )
            self._num_calls += 1
            try:
                if not has_one_request:
                    return await inner(request, context)
                # No variable holds the request, so that a long answer does not keep it in memory.
                return await inner(await self._receive(context, method), context)
            finally:
                self._num_calls -= 1

        return rebuild(handler, with_bounds, handler.request_deserializer, request_streaming=True)

    async def _receive(self, context: Context, method: str) -> Any:
        peer = context.peer()
        receiving_of_peer = self._receiving_by_peer.get(peer)
        if receiving_of_peer is None:
            receiving_of_peer = asyncio.Semaphore(MAX_RECEIVED_PER_CONNECTION)
            self._receiving_by_peer[peer] = receiving_of_peer
        async with receiving_of_peer, self._receiving:
            limit = asyncio.timeout(self._request_timeout_s)
            try:
                async with limit:
                    request = await context.read()
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"the request did not come within {self._request_timeout_s} s"
                raise _call_failed(_LateRequestError(message)) from None
        if request is grpc.aio.EOF:
            raise _call_failed(MalformedRequestError(method))
        return request


def _call_failed(error: Exception) -> CallFailedError:
    return CallFailedError(to_status(error, _ERROR_TABLE))
