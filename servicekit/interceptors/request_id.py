"""The request id of a call: read from its metadata or made, logged, and sent back.

The caller gives it as metadata `x-request-id`. It stands on all log lines of the call and in its
trailing metadata. A handler whose request carries an id adopts it (`logs.adopt_request_id`).
"""

import asyncio
import secrets
from typing import Any, NoReturn

import grpc
import structlog

from servicekit import logs
from servicekit.errors import STATUS_DETAILS_KEY
from servicekit.interceptors.base import (
    CODE_BY_NUMBER,
    CallFailedError,
    CallInterceptor,
    Context,
    Handler,
    behaviour_of,
    metadata_value,
    rebuild,
)

REQUEST_ID_KEY = "x-request-id"

_MAX_REQUEST_ID_CHARACTERS = 128

logger = logs.get_logger(__name__)


class RequestIdInterceptor(CallInterceptor):
    """Binds the request id and sends it back, whether the call succeeds or fails."""

    def wrap(self, handler: Handler, method: str) -> Handler:
        inner = behaviour_of(handler)

        async def with_request_id(request: Any, context: Context) -> Any:
            request_id = valid_request_id(metadata_value(context, REQUEST_ID_KEY))
            sent_back = (REQUEST_ID_KEY, request_id)
            # Set before the handler runs, for handlers that abort; and again afterwards, for those
            # that set trailing metadata of their own.
            context.set_trailing_metadata((sent_back,))
            status = None
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                try:
                    response = await inner(request, context)
                except CallFailedError as error:
                    status = error.status
                except asyncio.CancelledError:
                    # Either the caller cancelled, or the service cancelled the handler or a task
                    # that it awaited; here they look the same. In the second case gRPC would send
                    # nothing and the caller would wait forever. Answering a caller who is gone
                    # does no harm.
                    if not context.done():
                        await _abort(context, grpc.StatusCode.CANCELLED, "cancelled by the server")
                    raise
                adopted = logs.request_id()
            trailing = tuple(pair for pair in context.trailing_metadata() if pair != sent_back)
            trailing = (*trailing, (REQUEST_ID_KEY, adopted) if _is_valid(adopted) else sent_back)
            if status is None:
                context.set_trailing_metadata(trailing)
                return response
            # An abort sends only the metadata that it is given, not what was set before.
            details = (STATUS_DETAILS_KEY, status.SerializeToString())
            code = CODE_BY_NUMBER[status.code]
            return await _abort(context, code, status.message, (*trailing, details))

        return rebuild(handler, with_request_id, handler.request_deserializer)


async def _abort(context: Context, code: grpc.StatusCode, message: str, *metadata: Any) -> NoReturn:
    """Ends the call; raises always, as gRPC expects it of its handler.

    Raises:
        CancelledError: the call is over already: gRPC's core ended it by itself, as where a
            compressed message expands beyond the limit. gRPC would log it as the handler's error.
    """
    try:
        await context.abort(code, message, *metadata)
    except grpc.aio.InternalError as error:
        logger.debug("call_over_before_its_status", code=code.name, reason=message)
        raise asyncio.CancelledError from error


def valid_request_id(given: str) -> str:
    """The id that a caller gave, or a new one if that is no valid id."""
    return given if _is_valid(given) else secrets.token_hex(16)


def _is_valid(request_id: str) -> bool:
    is_short = 0 < len(request_id) <= _MAX_REQUEST_ID_CHARACTERS
    return is_short and request_id.isprintable() and request_id.isascii()
