"""Bounds on the work of a server: calls in flight, and requests being received.

At most `max_concurrent_calls` run at a time, without health checks. A call of one request is
answered once the request has arrived, which may take `request_timeout_s`. At most
`MAX_RECEIVED_AT_ONCE` requests are received at a time, `MAX_RECEIVED_PER_CONNECTION` of them over
one connection.

A caller who is known, by token or certificate, gets a share of both (`servicekit.shares`), however
many connections it has: one that opens calls and sends nothing delays nobody else.
"""

import asyncio
import weakref
from collections import Counter
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
from servicekit.interceptors.callers import caller_of
from servicekit.shares import leaves_room

#: Requests received at a time, each of up to `MAX_RECEIVE_BYTES`: so the requests that no handler
#: has seen yet hold at most 320 MiB. Further ones wait at their clients, except for what fits a
#: stream's flow-control window.
MAX_RECEIVED_AT_ONCE = 64

#: Of these, from one caller who is known.
MAX_RECEIVED_PER_CALLER = 16

#: Of these, over one connection: a client that announces requests and does not send them delays
#: nobody else.
MAX_RECEIVED_PER_CONNECTION = 8

# When a caller that was refused may retry.
_RETRY_AFTER_MS = 1_000

# Health must be answered above all when the server is overloaded.
_UNBOUNDED_SERVICE = "/grpc.health.v1.Health/"


# Names of a certificate, a token, or a connection, after what it is.
_Caller = tuple[str, ...]
_ANYBODY: _Caller = ()


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

    def __init__(
        self, max_concurrent_calls: int, request_timeout_s: float, *, knows_tokens: bool
    ) -> None:
        """Args:
        max_concurrent_calls, request_timeout_s: see the module.
        knows_tokens: whether a token that comes here is a caller's; else anybody can make one up.
        """
        super().__init__()
        self._max_concurrent_calls = max_concurrent_calls
        self._request_timeout_s = request_timeout_s
        self._num_calls = 0
        # By caller; those without any are left out.
        self._num_calls_of: Counter[_Caller] = Counter()
        self._receiving = asyncio.Semaphore(MAX_RECEIVED_AT_ONCE)
        self._knows_tokens = knows_tokens
        # By connection and by caller, while a call holds the semaphore or waits for it.
        self._receiving_of: weakref.WeakValueDictionary[_Caller, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    def wrap(self, handler: Handler, method: str) -> Handler:
        if method.startswith(_UNBOUNDED_SERVICE):
            return handler
        inner = behaviour_of(handler)
        has_one_request = not handler.request_streaming

        async def with_bounds(request: Any, context: Context) -> Any:
            caller = self._caller(context)
            self._check_room(caller)
            self._num_calls += 1
            self._num_calls_of[caller] += 1
            try:
                if not has_one_request:
                    return await inner(request, context)
                # No variable holds the request, so that a long answer does not keep it in memory.
                return await inner(await self._receive(context, caller, method), context)
            finally:
                self._num_calls -= 1
                self._num_calls_of[caller] -= 1
                if not self._num_calls_of[caller]:
                    del self._num_calls_of[caller]

        return rebuild(handler, with_bounds, handler.request_deserializer, request_streaming=True)

    def _check_room(self, caller: _Caller) -> None:
        num_free = self._max_concurrent_calls - self._num_calls
        if num_free < 1:
            raise _too_many(f"{self._num_calls} calls are in flight, the maximum")
        held = self._num_calls_of[caller]
        if caller != _ANYBODY and not leaves_room(held=held, added=1, num_free=num_free):
            raise _too_many(f"{held} calls of this caller are in flight, its share")

    async def _receive(self, context: Context, caller: _Caller, method: str) -> Any:
        over_connection = self._share_of(
            ("connection", context.peer()), MAX_RECEIVED_PER_CONNECTION
        )
        from_caller = self._share_of(
            caller, MAX_RECEIVED_AT_ONCE if caller == _ANYBODY else MAX_RECEIVED_PER_CALLER
        )
        async with over_connection, from_caller, self._receiving:
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

    def _share_of(self, key: _Caller, size: int) -> asyncio.Semaphore:
        share = self._receiving_of.get(key)
        if share is None:
            share = self._receiving_of[key] = asyncio.Semaphore(size)
        return share

    def _caller(self, context: Context) -> _Caller:
        caller = caller_of(context)
        if self._knows_tokens and caller.token is not None:
            return ("token", caller.token)
        if caller.certificate_names:
            return ("certificate", *caller.certificate_names)
        return _ANYBODY


def _too_many(message: str) -> CallFailedError:
    return _call_failed(_TooManyCallsError(message, retry_after_ms=_RETRY_AFTER_MS))


def _call_failed(error: Exception) -> CallFailedError:
    return CallFailedError(to_status(error, _ERROR_TABLE))
