"""What can go wrong with a request to the verifier, and the status each becomes.

RequestError
├── InvalidRequestError      INVALID_ARGUMENT     the caller's mistake, in `field`
├── UnsupportedFieldError    UNIMPLEMENTED        a field that this server cannot honour yet
├── WrongModelError          FAILED_PRECONDITION  another model is served
├── OverloadedError          RESOURCE_EXHAUSTED   no room; `retry_after_ms` says when to ask again
├── NotReadyError            UNAVAILABLE          the model is still being loaded
├── DrainingError            UNAVAILABLE          shutting down
├── IdleError                DEADLINE_EXCEEDED    a draft that was waited for never came
├── SessionError             FAILED_PRECONDITION  a session's protocol was not kept
├── ModelOutputError         INTERNAL             the model computed what is not finite
└── InternalError            INTERNAL             a fault of the verifier's own, logged
"""

import grpc

from servicekit.errors import ErrorTable, RequestError


class InvalidRequestError(RequestError):
    """The field's value is not acceptable."""


class UnsupportedFieldError(RequestError):
    """The field's capability is not there (yet)."""


class WrongModelError(RequestError):
    """`expected_model_digest` is not the served model's."""


class OverloadedError(RequestError):
    """There is no room for this request now, or for this session's unread events."""


class NotReadyError(RequestError):
    """The model is still being loaded."""


class DrainingError(RequestError):
    """The server is shutting down."""


class IdleError(RequestError):
    """A sequence that always waits for drafts got none within the idle timeout."""


class SessionError(RequestError):
    """No Hello first, or an unknown protocol version."""


class ModelOutputError(RequestError):
    """What the model computed for this sequence is not finite."""


NOT_FINITE_KV = "the model's keys or values for this sequence are not finite"
NOT_FINITE_LOGITS = "the model's logits for this sequence are not finite"


class InternalError(RequestError):
    """A fault of the verifier's own ended this sequence. It says nothing more: the log does."""

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
