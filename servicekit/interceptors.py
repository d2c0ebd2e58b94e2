"""What happens around every call: request id, metrics, bounds, errors.

Owns these four, in this order from the outside in. Knows no service: the error table and the
registry are given. Handlers are coroutines or asynchronous generators of grpc.aio.

Every handler, also one that yields its responses, is called through one coroutine that iterates
it and writes, as gRPC would do itself; the outer layers await that coroutine once per call. So a
message on a stream passes through no code of this module but one `async for`.
"""

import asyncio
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import grpc
import structlog
from google.rpc import status_pb2
from prometheus_client import CollectorRegistry, Counter, Histogram

from servicekit import logs
from servicekit.errors import (
    STATUS_DETAILS_KEY,
    ErrorTable,
    MalformedRequestError,
    RequestError,
    code_number,
    find_code,
    to_status,
)
from servicekit.logs import Logger
from servicekit.message_limits import MessageLimits

REQUEST_ID_KEY = "x-request-id"

#: So many requests at a time may be on their way in, each of up to `MAX_RECEIVE_BYTES`: what a
#: process holds of requests that it has not begun to look at is bounded by the product, 320 MiB.
#: Further ones wait at their clients, but for what fits a stream's window.
MAX_RECEIVED_AT_ONCE = 64

#: Of these, from one connection: who says that a request comes and does not send it holds up
#: nobody else.
MAX_RECEIVED_AT_ONCE_OF_ONE = 8

_MAX_REQUEST_ID_CHARACTERS = 128

# When a caller that found too many calls may sensibly come back.
_RETRY_AFTER_MS = 1_000

# Health is asked also, and above all, where there is too much else to do.
_UNBOUNDED_SERVICE = "/grpc.health.v1.Health/"

# From a cheap unary call to a stream that lives as long as its peer.
_DURATION_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
    1800, 7200,
)  # fmt: skip

_Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Handler = grpc.RpcMethodHandler  # generic in its stubs only
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]

# A handler in its one form here: takes the request (or the iterator of them) and the context,
# returns the response (or None, having written the responses itself).
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]


def server_interceptors(
    *,
    error_table: ErrorTable,
    registry: CollectorRegistry,
    logger: Logger,
    limits: Mapping[str, MessageLimits],
    max_concurrent_calls: int,
    request_timeout_s: float,
) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of a server, outermost first.

    - Request id: taken from the caller's metadata `x-request-id`, or made; bound to all log lines
      of the call; sent back as trailing metadata. A handler whose request brings its own adopts it
      (`logs.adopt_request_id`).
    - Metrics: `tandem_rpc_requests{service, method, code}` and
      `tandem_rpc_duration_seconds{service, method}`.
    - Bounds: at most `max_concurrent_calls` at a time, health checks aside; a call of one request
      is answered only once that is here, which may take `request_timeout_s`, and at most
      `MAX_RECEIVED_AT_ONCE` are received at a time, `MAX_RECEIVED_AT_ONCE_OF_ONE` of a connection.
    - Errors: an exception in the table becomes its status, with the field and the retry delay;
      any other becomes INTERNAL `internal error` and is logged once, with its traceback.
    - Limits: of each method's requests, by its path `/package.Service/Method`. A request over
      them does not reach the handler. Of those of a stream only the size is checked here: what
      becomes of one that holds too much is the handler's decision.
    """
    return [
        _RequestIdInterceptor(),
        _MetricsInterceptor(registry),
        _BoundsInterceptor(max_concurrent_calls, request_timeout_s),
        _ErrorInterceptor(error_table, logger, limits),
    ]


class _Interceptor(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once, and keeps it: methods are few, calls are many."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[_Handler, _Handler]] = {}

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            self.on_unknown_method()
            return None
        method = handler_call_details.method
        inner, wrapped = self._wrapped.get(method, (None, None))
        if wrapped is None or inner is not handler:
            wrapped = self.wrap(handler, method)
            self._wrapped[method] = handler, wrapped
        return wrapped

    def on_unknown_method(self) -> None:
        """Called for a method that no service has."""

    def wrap(self, handler: _Handler, method: str) -> _Handler:
        """The handler with this layer around it; `method` is `/package.Service/Method`."""
        raise NotImplementedError


class _StatusError(Exception):
    """How a call failed; on its way out through the layers, the outermost of which says so.

    Not aborted where it is found: callers would hear of a failure before it is counted.
    """

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class _RequestIdInterceptor(_Interceptor):
    """Binds the request id, and sends it back with whatever the call came to."""

    def wrap(self, handler: _Handler, method: str) -> _Handler:
        inner = _behaviour(handler)

        async def with_request_id(request: Any, context: _Context) -> Any:
            request_id = _read_request_id(context) or secrets.token_hex(16)
            sent_back = (REQUEST_ID_KEY, request_id)
            # Set before, for handlers that abort; and after, for those that set their own.
            context.set_trailing_metadata((sent_back,))
            status = None
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                try:
                    response = await inner(request, context)
                except _StatusError as error:
                    status = error.status
                except asyncio.CancelledError:
                    # Who was cancelled by the caller has nobody to tell; but a handler that the
                    # service cancelled, or that awaited what the service cancelled, would leave
                    # its caller waiting for ever: gRPC sends nothing then. Which of the two it
                    # is cannot be seen, and answering a caller who is gone merely fails.
                    if not context.done():
                        await context.abort(grpc.StatusCode.CANCELLED, "the server gave it up")
                    raise
                # The handler may have found another in the request itself.
                adopted = logs.request_id()
            trailing = tuple(pair for pair in context.trailing_metadata() if pair != sent_back)
            trailing = (*trailing, (REQUEST_ID_KEY, adopted) if _is_sane(adopted) else sent_back)
            if status is None:
                context.set_trailing_metadata(trailing)
                return response
            # Given along: what was set before is not sent beside an abort's own metadata.
            details = (STATUS_DETAILS_KEY, status.SerializeToString())
            code = _CODE_BY_NUMBER[status.code]
            return await context.abort(code, status.message, (*trailing, details))

        return _rebuild(handler, with_request_id, handler.request_deserializer)


class _MetricsInterceptor(_Interceptor):
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
        # Never under the name that the caller chose: there is no end of names.
        self._requests.labels("unknown", "unknown", grpc.StatusCode.UNIMPLEMENTED.name).inc()

    def wrap(self, handler: _Handler, method: str) -> _Handler:
        inner = _behaviour(handler)
        service, _, name = method.removeprefix("/").rpartition("/")
        duration = self._duration.labels(service, name)

        async def with_metrics(request: Any, context: _Context) -> Any:
            start_s = time.perf_counter()
            code = grpc.StatusCode.UNKNOWN
            try:
                response = await inner(request, context)
                code = _code(context)
                return response
            except _StatusError as error:
                code = _CODE_BY_NUMBER[error.status.code]
                raise
            except grpc.aio.AbortError:
                code = _code(context)
                raise
            except (asyncio.CancelledError, grpc.aio.BaseError):
                # The caller went away; BaseError: while it was being written to.
                is_late = context.time_remaining() == 0
                code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
                raise
            finally:
                duration.observe(time.perf_counter() - start_s)
                self._requests.labels(service, name, code.name).inc()

        return _rebuild(handler, with_metrics, handler.request_deserializer)


class _TooManyCallsError(RequestError):
    pass


class _LateRequestError(RequestError):
    pass


_BOUNDS_TABLE: ErrorTable = {
    _TooManyCallsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    _LateRequestError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class _BoundsInterceptor(_Interceptor):
    """Counts calls, and receives the request where there is one.

    gRPC would receive it before it asks anybody, as many at a time as there are calls. Here a
    handler of one request is one of a stream of requests to gRPC, and the stream's only one is read
    when it is its turn.
    """

    def __init__(self, max_concurrent_calls: int, request_timeout_s: float) -> None:
        super().__init__()
        self._max_concurrent_calls = max_concurrent_calls
        self._request_timeout_s = request_timeout_s
        self._num_calls = 0
        self._turns = asyncio.Semaphore(MAX_RECEIVED_AT_ONCE)
        # By connection, while one of its calls has a turn or waits for one.
        self._turns_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )

    def wrap(self, handler: _Handler, method: str) -> _Handler:
        if method.startswith(_UNBOUNDED_SERVICE):
            return handler
        inner = _behaviour(handler)
        has_one_request = not handler.request_streaming

        async def with_bounds(request: Any, context: _Context) -> Any:
            if self._num_calls >= self._max_concurrent_calls:
                raise _bounds_error(
                    _TooManyCallsError(
                        f"{self._num_calls} calls are being answered, the most at a time",
                        retry_after_ms=_RETRY_AFTER_MS,
                    )
                )
            self._num_calls += 1
            try:
                if not has_one_request:
                    return await inner(request, context)
                # Not by a name: who answers for long must not hold what was received for as long.
                return await inner(await self._receive(context, method), context)
            finally:
                self._num_calls -= 1

        make = _HANDLER_MAKERS[True, bool(handler.response_streaming)]
        return make(with_bounds, handler.request_deserializer, handler.response_serializer)

    async def _receive(self, context: _Context, method: str) -> Any:
        peer = context.peer()
        turns_of_peer = self._turns_of.get(peer)
        if turns_of_peer is None:
            turns_of_peer = asyncio.Semaphore(MAX_RECEIVED_AT_ONCE_OF_ONE)
            self._turns_of[peer] = turns_of_peer
        async with turns_of_peer, self._turns:
            limit = asyncio.timeout(self._request_timeout_s)
            try:
                async with limit:
                    request = await context.read()
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"the request did not come within {self._request_timeout_s} s"
                raise _bounds_error(_LateRequestError(message)) from None
        if request is grpc.aio.EOF:
            raise _bounds_error(MalformedRequestError(method))
        return request


def _bounds_error(error: Exception) -> "_StatusError":
    return _StatusError(to_status(error, _BOUNDS_TABLE))


class _ErrorInterceptor(_Interceptor):
    def __init__(
        self, error_table: ErrorTable, logger: Logger, limits: Mapping[str, MessageLimits]
    ) -> None:
        super().__init__()
        self._limits = limits
        self._error_table = error_table
        self._logger = logger

    def wrap(self, handler: _Handler, method: str) -> _Handler:
        deserialize = _deserializer(handler, method, self._limits.get(method))
        # gRPC answers a unary request that cannot be read with UNKNOWN, and logs a traceback each
        # time; read in here, it is an error like any other. A stream's requests are read inside
        # the handler anyway.
        is_read_here = not handler.request_streaming
        run = _as_coroutine(handler)

        async def with_errors(request: Any, context: _Context) -> Any:
            try:
                if is_read_here:
                    request = deserialize(request)
                return await run(request, context)
            except Exception as error:
                if _is_over(error, context):
                    raise
                if find_code(error, self._error_table) is None:
                    self._logger.exception("rpc_failed", method=method)
                if _is_cancelled():
                    # The handler met its cancellation with an error: nobody is there to read it.
                    raise asyncio.CancelledError from error
                raise _StatusError(to_status(error, self._error_table)) from error

        return _rebuild(handler, with_errors, None if is_read_here else deserialize)


def _behaviour(handler: _Handler) -> _Behaviour:
    behaviour: Any = (
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    return cast(_Behaviour, behaviour)


def _as_coroutine(handler: _Handler) -> _Behaviour:
    function: Callable[[Any, _Context], Any] = _behaviour(handler)

    async def respond(request: Any, context: _Context) -> Any:
        return await function(request, context)

    async def respond_with_stream(request: Any, context: _Context) -> None:
        responses = function(request, context)
        if not hasattr(responses, "__aiter__"):
            await responses  # it writes its responses itself
            return
        try:
            async for response in responses:
                await context.write(response)
        finally:
            # What the handler holds is let go now, not when the collector comes by.
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    return respond_with_stream if handler.response_streaming else respond


def _deserializer(
    handler: _Handler, method: str, limits: MessageLimits | None
) -> Callable[[bytes], Any]:
    inner = handler.request_deserializer
    checks_whole = not handler.request_streaming

    def deserialize(serialized: bytes) -> Any:
        if limits is not None:
            limits.check_size(serialized)
        if inner is None:
            return serialized
        try:
            request = inner(serialized)
        except Exception as error:
            raise MalformedRequestError(method) from error
        if limits is not None and checks_whole:
            limits.check(request)
        return request

    return deserialize


def _rebuild(
    handler: _Handler, behaviour: _Behaviour, deserializer: Callable[[bytes], Any] | None
) -> _Handler:
    make = _HANDLER_MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, deserializer, handler.response_serializer)


def _code(context: _Context) -> grpc.StatusCode:
    code: object = context.code()  # None unless the handler set one; grpc takes numbers too
    if code is None:
        return grpc.StatusCode.OK
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODE_BY_NUMBER.get(cast(int, code), grpc.StatusCode.UNKNOWN)


def _is_over(error: Exception, context: _Context) -> bool:
    # Aborted by the handler, or the connection or the server is gone; but UsageError is gRPC's
    # word for the handler's own mistakes.
    if context.done():
        return True
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _read_request_id(context: _Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return value if _is_sane(value) else None
    return None


def _is_sane(request_id: str) -> bool:
    is_sane = 0 < len(request_id) <= _MAX_REQUEST_ID_CHARACTERS and request_id.isprintable()
    return is_sane and request_id.isascii()


_CODE_BY_NUMBER = {code_number(code): code for code in grpc.StatusCode}

_HANDLER_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
