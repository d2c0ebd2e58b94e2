"""Why an RPC fails as a whole, and the status each failure becomes.

    RequestError (servicekit)
    ├── MalformedBatchError    INVALID_ARGUMENT, names the field; nothing was applied
    ├── UnsupportedFieldError  UNIMPLEMENTED, names the field; nothing was applied
    ├── UnreadAnswersError     RESOURCE_EXHAUSTED: the client does not read its stream
    └── NotServingError        UNAVAILABLE: starting, or shutting down

What fails for one sequence is a status of its proposal, see `refusals.py`.
"""

import grpc

from servicekit.errors import ErrorTable, RequestError


class MalformedBatchError(RequestError):
    """The request is not one that a client may send."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}", field=field)


class UnsupportedFieldError(RequestError):
    """The request asks for what this server does not offer."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}", field=field)


class UnreadAnswersError(RequestError):
    """The client leaves the answers on its stream unread."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"answers were left unread for {timeout_s} s")


class NotServingError(RequestError):
    """The drafter is not ready yet, or is shutting down."""


ERROR_TABLE: ErrorTable = {
    MalformedBatchError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedFieldError: grpc.StatusCode.UNIMPLEMENTED,
    UnreadAnswersError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotServingError: grpc.StatusCode.UNAVAILABLE,
}
