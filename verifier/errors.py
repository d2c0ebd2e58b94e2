"""Errors of requests to the verifier, and the status of each.

RequestError
├── InvalidRequestError      INVALID_ARGUMENT     the caller's mistake, in `field`
├── UnsupportedFieldError    UNIMPLEMENTED        a field that this server does not support
├── WrongModelError          FAILED_PRECONDITION  another model is served
├── OverloadedError          RESOURCE_EXHAUSTED   no room; `retry_after_ms` says when to ask again
├── NotReadyError            UNAVAILABLE          the model is still being loaded
├── DrainingError            UNAVAILABLE          shutting down
├── IdleError                DEADLINE_EXCEEDED    no draft came under DRAFT_WAIT_ALWAYS
├── SessionError             FAILED_PRECONDITION  the client violated the session's protocol
├── ModelOutputError         INTERNAL             the model computed NaN or infinity
└── InternalError            INTERNAL             a fault of the verifier's own, logged
"""

import grpc

from servicekit.errors import ErrorTable, RequestError


class InvalidRequestError(RequestError):
    """The field's value is not acceptable."""


class UnsupportedFieldError(RequestError):
    """The server does not support this field, or has it disabled."""


class WrongModelError(RequestError):
    """`expected_model_digest` is not the served model's."""


class OverloadedError(RequestError):
    """There is no room for this request now, or for this session's unread events."""


class NotReadyError(RequestError):
    """The model is still being loaded."""


class DrainingError(RequestError):
    """The server is shutting down."""


class IdleError(RequestError):
    """A sequence under DRAFT_WAIT_ALWAYS got no draft within the idle timeout."""


class SessionError(RequestError):
    """No Hello first, or an unknown protocol version."""


class ModelOutputError(RequestError):
    """The model's output for this sequence is not finite."""


NOT_FINITE_KV = "the model's keys or values for this sequence are not finite"
NOT_FINITE_LOGITS = "the model's logits for this sequence are not finite"


class InternalError(RequestError):
    """A fault of the verifier's own ended this sequence; only the log says which."""

    def __init__(self) -> None:
        super().__init__("internal error")


ERROR_TABLE: ErrorTable = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedFieldError: grpc.StatusCode.UNIMPLEMENTED,
    WrongModelError: grpc.StatusCode.FAILED_PRECONDITION,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReadyError: grpc.StatusCode.UNAVAILABLE,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    IdleError: grpc.StatusCode.DEADLINE_EXCEEDED,
    SessionError: grpc.StatusCode.FAILED_PRECONDITION,
    ModelOutputError: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
}
