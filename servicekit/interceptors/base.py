"""What the interceptors share: a base class, and handlers as plain coroutines.

Handlers are coroutines or asynchronous generators of grpc.aio. The innermost interceptor turns
each into one coroutine that writes its own responses, as gRPC would do itself; the outer ones
await that coroutine once per call. So a message of a stream passes through one `async for` only.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.rpc import status_pb2

from servicekit.errors import code_number

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler  # generic in its stubs only

# Takes the request (or an iterator of requests) and the context; returns the response, or None if
# it has written the responses itself.
Behaviour = Callable[[Any, Context], Awaitable[Any]]

# How much earlier than ours a client's deadline may pass, beside 1 % for rounding: the way of the
# call, and a busy machine that reads it late.
_CLIENT_LEAD_S = 0.1

#: Of the methods of health checks, which anybody may call.
HEALTH_PREFIX = "/grpc.health.v1.Health/"

CODE_BY_NUMBER = {code_number(code): code for code in grpc.StatusCode}


class CallFailedError(Exception):
    """How a call failed. Travels out through the interceptors; the outermost aborts the call.

    The call is not aborted where it fails, because its caller would hear of the failure before
    the failure is counted.
    """

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once and keeps the result: methods are few, calls are many."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
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

    def wrap(self, handler: Handler, method: str) -> Handler:
        """The handler inside this interceptor; `method` is `/package.Service/Method`."""
        raise NotImplementedError


def time_left_s(context: Context) -> float | None:
    """How long the call may still take until its client's deadline passes; None: it has none.

    The client's clock began earlier than ours and ends the call first, and gRPC sends it a rounded
    deadline: a call that the client ends from then on is late, and is not a cancelled one.
    """
    # None without a deadline, though typed as a number.
    remaining_s = cast("float | None", context.time_remaining())
    return None if remaining_s is None else 0.99 * remaining_s - _CLIENT_LEAD_S


def behaviour_of(handler: Handler) -> Behaviour:
    """The function behind a handler."""
    behaviour: Any = (
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    return cast(Behaviour, behaviour)


def coroutine_of(handler: Handler) -> Behaviour:
    """The function behind a handler as one coroutine, which writes a stream of responses itself."""
    function: Callable[[Any, Context], Any] = behaviour_of(handler)

    async def respond(request: Any, context: Context) -> Any:
        return await function(request, context)

    async def respond_with_stream(request: Any, context: Context) -> None:
        responses = function(request, context)
        if not hasattr(responses, "__aiter__"):
            await responses  # it writes its responses itself
            return
        try:
            async for response in responses:
                await context.write(response)
        finally:
            # Closed now, so that the handler frees what it holds before the garbage collector runs.
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    return respond_with_stream if handler.response_streaming else respond


def rebuild(
    handler: Handler,
    behaviour: Behaviour,
    deserializer: Callable[[bytes], Any] | None,
    *,
    request_streaming: bool | None = None,
) -> Handler:
    """A handler with another function and another deserializer.

    Args:
        handler: gives the shape and the serializer.
        behaviour: the new function.
        deserializer: the new one; None gives the function the bytes.
        request_streaming: whether gRPC is told that requests are a stream; None: as `handler` says.
    """
    if request_streaming is None:
        request_streaming = bool(handler.request_streaming)
    make = _HANDLER_MAKERS[request_streaming, bool(handler.response_streaming)]
    return make(behaviour, deserializer, handler.response_serializer)


def metadata_value(context: Context, key: str) -> str:
    """The first text that a call's metadata has for a key; "" if there is none."""
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""


_HANDLER_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
