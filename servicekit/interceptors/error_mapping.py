"""Exceptions of handlers to statuses, and the limits of requests.

An exception in the error table becomes its status, with the field and the retry delay. Any other
becomes INTERNAL `internal error` and is logged once, with its traceback. A request over its limits
does not reach the handler; of a request in a stream only the size is checked here, because the
handler decides what happens to the stream.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from servicekit.errors import ErrorTable, MalformedRequestError, find_code, to_status
from servicekit.interceptors.base import (
    CallFailedError,
    CallInterceptor,
    Context,
    Handler,
    coroutine_of,
    rebuild,
)
from servicekit.logs import Logger
from servicekit.message_limits import MessageLimits


class ErrorInterceptor(CallInterceptor):
    """The innermost interceptor: parses requests and maps what handlers raise."""

    def __init__(
        self, error_table: ErrorTable, logger: Logger, limits: Mapping[str, MessageLimits]
    ) -> None:
        super().__init__()
        self._limits = limits
        self._error_table = error_table
        self._logger = logger

    def wrap(self, handler: Handler, method: str) -> Handler:
        deserialize = _deserializer(handler, method, self._limits.get(method))
        # gRPC answers a single request that it cannot parse with UNKNOWN, and logs a traceback each
        # time. Parsed here, it is an error like any other. The requests of a stream are parsed
        # while the handler reads them.
        parses_here = not handler.request_streaming
        run = coroutine_of(handler)

        async def with_errors(request: Any, context: Context) -> Any:
            try:
                if parses_here:
                    request = deserialize(request)
                return await run(request, context)
            except grpc.aio.InternalError as error:
                # The call was over when a response was to be written. gRPC has raised this, but
                # logs it as an error of the handler where it learns of the end only later.
                raise asyncio.CancelledError from error
            except Exception as error:
                if _is_over(error, context):
                    raise
                if find_code(error, self._error_table) is None:
                    self._logger.exception("rpc_failed", method=method)
                if _is_cancelled():
                    # The handler raised while it was being cancelled: no caller reads the error.
                    raise asyncio.CancelledError from error
                raise CallFailedError(to_status(error, self._error_table)) from error

        return rebuild(handler, with_errors, None if parses_here else deserialize)


def _deserializer(
    handler: Handler, method: str, limits: MessageLimits | None
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


def _is_over(error: Exception, context: Context) -> bool:
    # The handler aborted, or the connection or the server is gone. UsageError is different: gRPC
    # raises it for mistakes in the handler's code.
    if context.done():
        return True
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
