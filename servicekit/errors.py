"""Domain exceptions to gRPC statuses, and back.

Owns the form of an error on the wire: a google.rpc.Status whose details carry a BadRequest field
violation and a RetryInfo (AIP-193, https://google.aip.dev/193). Each service has its own table of
exceptions and codes. An exception that is not in the table becomes INTERNAL without its message.

    RequestError                  one request is wrong; services derive their own
      +- MalformedRequestError    its bytes are not the message that the method expects
      +- MessageLimitError        it exceeds a limit of its .proto file
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

#: The code of each exception of a service. Looked up along the exception's MRO: an entry for a base
#: class covers its subclasses, and the nearest entry wins.
ErrorTable = Mapping[type[Exception], grpc.StatusCode]

#: The metadata key under which gRPC carries a serialized google.rpc.Status.
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# A status travels in HTTP/2 headers, which peers limit to 8 KiB: the message once percent-encoded
# (up to 3 bytes for 1) and twice in base64. A longer one would not arrive.
_MAX_MESSAGE_BYTES = 768
_MAX_FIELD_BYTES = 256

_Detail = TypeVar("_Detail", bound=Message)


class RequestError(Exception):
    """A request that cannot be served.

    Args:
        message: the reason, for the caller; it carries the offending value.
        field: path of the offending field in the request, e.g. `sampling.top_p`; "" if it is not
            one field.
        retry_after_ms: when the same request may succeed; None if repeating it does not help.
    """

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class MalformedRequestError(RequestError):
    """The bytes of a request are not the message that the method expects."""

    def __init__(self, method: str) -> None:
        super().__init__(f"the request is not a message that {method} accepts")


class MessageLimitError(RequestError):
    """A field of a request, or the request as a whole, exceeds its limit.

    Args:
        field: its path, e.g. `stop_sequences[3]`; "" if it is not one field.
        reason: the size and the limit.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason, field=field)
        self.reason = reason


def find_code(error: Exception, table: ErrorTable) -> grpc.StatusCode | None:
    """The error's code in the table, nearest class first; None if it has none."""
    if isinstance(error, MalformedRequestError | MessageLimitError):
        return grpc.StatusCode.INVALID_ARGUMENT
    for cls in type(error).__mro__:
        code = table.get(cls)
        if code is not None:
            return code
    return None


def to_status(error: Exception, table: ErrorTable) -> status_pb2.Status:
    """The google.rpc.Status of an error.

    An error that is not in the table becomes INTERNAL `internal error`: its own text was not
    written for callers. `grpc_status.rpc_status.to_status` accepts the result.
    """
    code = find_code(error, table)
    if code is None:
        return status_pb2.Status(
            code=code_number(grpc.StatusCode.INTERNAL), message="internal error"
        )
    if not isinstance(error, RequestError):
        return status_pb2.Status(
            code=code_number(code), message=_shorten(str(error), _MAX_MESSAGE_BYTES)
        )
    message = _shorten(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_number(code), message=message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(error.field, _MAX_FIELD_BYTES), description=message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return status


def code_number(code: grpc.StatusCode) -> int:
    """The number of google.rpc.Code, which events on multiplexed streams carry."""
    return code.value[0]


def field_violation(rpc_error: grpc.RpcError) -> tuple[str, str] | None:
    """The (field, description) of a failed call's field violation, or None."""
    bad_request = _detail(rpc_error, error_details_pb2.BadRequest)
    if bad_request is None or not bad_request.field_violations:
        return None
    violation = bad_request.field_violations[0]
    return violation.field, violation.description


def retry_after_ms(rpc_error: grpc.RpcError) -> int | None:
    """The retry delay that a failed call carries, or None."""
    retry = _detail(rpc_error, error_details_pb2.RetryInfo)
    return None if retry is None else retry.retry_delay.ToMilliseconds()


def _detail(rpc_error: grpc.RpcError, kind: type[_Detail]) -> _Detail | None:
    # Every error of a call, synchronous or asyncio, is also its grpc.Call.
    metadata = cast(
        Iterable[tuple[str, str | bytes]], cast(grpc.Call, rpc_error).trailing_metadata() or ()
    )
    for key, value in metadata:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:  # the peer may be any server
                return None
            for packed in status.details:
                detail = kind()
                if packed.Unpack(detail):
                    return detail
    return None


def _shorten(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")  # Python's strings may hold lone surrogates
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
