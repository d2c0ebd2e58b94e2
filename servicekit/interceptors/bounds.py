"""Bounds on the work of a server: calls in flight, and requests being received.

At most `max_concurrent_calls` run at a time, without health checks. A call of one request is
answered once the request has arrived, which may take `request_timeout_s`. At most
`MAX_RECEIVED_AT_ONCE` requests are received at a time, `MAX_RECEIVED_PER_CONNECTION` of them over
one connection. The same bounds hold for each request of reflection's stream, since any caller may
open one.

Health checks have bounds of their own: they are answered when the server is overloaded, and anybody
may call them.

A caller who is known, by token or certificate, gets a share of both (`servicekit.shares`), however
many connections it has: one that opens calls and sends nothing delays nobody else.
"""

import asyncio
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc

from servicekit.errors import ErrorTable, MalformedRequestError, RequestError, to_status
from servicekit.interceptors.base import (
    HEALTH_PREFIX,
    Behaviour,
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

_REFLECTION_PREFIX = "/grpc.reflection."

#: Watches of health at a time: some 26 KB each.
MAX_WATCHES = 1_024

#: Health checks and watches whose requests are received at a time, and how long these may take.
#: One more ends the one that has been silent longest.
MAX_HEALTH_RECEIVED_AT_ONCE = 16
HEALTH_TIMEOUT_S = 10.0


_Request = TypeVar("_Request")

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
        self._num_watches = 0
        # In the order in which they began.
        self._receiving_health: OrderedDict[asyncio.Timeout, None] = OrderedDict()
        self._knows_tokens = knows_tokens
        # By connection and by caller, while a call holds the semaphore or waits for it.
        self._receiving_of: weakref.WeakValueDictionary[_Caller, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    def wrap(self, handler: Handler, method: str) -> Handler:
        is_health = method.startswith(HEALTH_PREFIX)
        behaviour = (self._bounded_health if is_health else self._bounded)(handler, method)
        return rebuild(handler, behaviour, handler.request_deserializer, request_streaming=True)

    def _bounded(self, handler: Handler, method: str) -> Behaviour:
        inner = behaviour_of(handler)
        has_one_request = not handler.request_streaming
        is_reflection = method.startswith(_REFLECTION_PREFIX)

        async def with_bounds(requests: Any, context: Context) -> Any:
            caller = self._caller(context)
            self._check_room(caller)
            self._num_calls += 1
            self._num_calls_of[caller] += 1
            try:
                if has_one_request:
                    # No variable holds it, so that a long answer does not keep it in memory.
                    return await inner(await self._receive_one(context, caller, method), context)
                if is_reflection:
                    requests = self._received(context, caller)
                return await inner(requests, context)
            finally:
                self._num_calls -= 1
                self._num_calls_of[caller] -= 1
                if not self._num_calls_of[caller]:
                    del self._num_calls_of[caller]

        return with_bounds

    def _bounded_health(self, handler: Handler, method: str) -> Behaviour:
        inner = behaviour_of(handler)

        async def check(_requests: Any, context: Context) -> Any:
            return await inner(await self._receive_health_check(context, method), context)

        async def watch(requests: Any, context: Context) -> Any:
            if self._num_watches >= MAX_WATCHES:
                raise _too_many(f"{self._num_watches} watches are in flight, the maximum")
            self._num_watches += 1
            try:
                return await check(requests, context)
            finally:
                self._num_watches -= 1

        return watch if handler.response_streaming else check

    def _check_room(self, caller: _Caller) -> None:
        num_free = self._max_concurrent_calls - self._num_calls
        if num_free < 1:
            raise _too_many(f"{self._num_calls} calls are in flight, the maximum")
        held = self._num_calls_of[caller]
        if caller != _ANYBODY and not leaves_room(held=held, added=1, num_free=num_free):
            raise _too_many(f"{held} calls of this caller are in flight, its share")

    async def _receive_one(self, context: Context, caller: _Caller, method: str) -> Any:
        return _checked(await self._receive(context, caller), method)

    async def _received(self, context: Context, caller: _Caller) -> AsyncIterator[Any]:
        """The requests of a stream."""
        while (request := await self._receive(context, caller)) is not grpc.aio.EOF:
            yield request

    async def _receive_health_check(self, context: Context, method: str) -> Any:
        over_connection = self._share_of(("health", context.peer()), MAX_RECEIVED_PER_CONNECTION)
        async with over_connection:
            limit = asyncio.timeout(HEALTH_TIMEOUT_S)
            if len(self._receiving_health) >= MAX_HEALTH_RECEIVED_AT_ONCE:
                # The one that has been silent longest: others' requests come at once.
                longest, _ = self._receiving_health.popitem(last=False)
                if not longest.expired():
                    longest.reschedule(0.0)
            self._receiving_health[limit] = None
            try:
                return _checked(await _in_time(context.read(), limit, "in time"), method)
            finally:
                self._receiving_health.pop(limit, None)

    async def _receive(self, context: Context, caller: _Caller) -> Any:
        """The next request; EOF: there is none."""
        over_connection = self._share_of(
            ("connection", context.peer()), MAX_RECEIVED_PER_CONNECTION
        )
        from_caller = self._share_of(
            caller, MAX_RECEIVED_AT_ONCE if caller == _ANYBODY else MAX_RECEIVED_PER_CALLER
        )
        async with over_connection, from_caller, self._receiving:
            limit_s = self._request_timeout_s
            return await _in_time(context.read(), asyncio.timeout(limit_s), f"within {limit_s} s")

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


async def _in_time(request: Awaitable[_Request], limit: asyncio.Timeout, when: str) -> _Request:
    try:
        async with limit:
            return await request
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"the request did not come {when}"
        raise _call_failed(_LateRequestError(message)) from None


def _checked(request: _Request, method: str) -> _Request:
    if request is grpc.aio.EOF:
        raise _call_failed(MalformedRequestError(method))
    return request


def _too_many(message: str) -> CallFailedError:
    return _call_failed(_TooManyCallsError(message, retry_after_ms=_RETRY_AFTER_MS))


def _call_failed(error: Exception) -> CallFailedError:
    return CallFailedError(to_status(error, _ERROR_TABLE))
