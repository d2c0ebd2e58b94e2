"""The errors of requests, and the gRPC status of each.

    RequestError
    ├── InvalidRequestError     INVALID_ARGUMENT     the caller's mistake, in `field`
    │   └── PromptTooLongError  INVALID_ARGUMENT     the prompt leaves no room for output
    ├── UnsupportedFieldError   UNIMPLEMENTED        a field that is not supported (yet)
    ├── UnauthenticatedError    UNAUTHENTICATED      no valid credentials
    ├── PermissionDeniedError   PERMISSION_DENIED    more than this client may do
    ├── OverloadedError         RESOURCE_EXHAUSTED   no room; see `retry_after_ms`
    │   ├── VerifierFullError   RESOURCE_EXHAUSTED   a verifier says so
    │   └── UnreadError         RESOURCE_EXHAUSTED   the client leaves too much unread
    ├── UnavailableError        UNAVAILABLE          no verifier, or it is gone, or draining
    ├── PreconditionError       FAILED_PRECONDITION  not the verifier that the request expects
    ├── DraftTimeoutError       DEADLINE_EXCEEDED    draft_wait=always, and no draft came
    └── VerifierError           INTERNAL             the verifier failed at this request

`from_verifier` turns a verifier's rejection, with its code and field, into one of these, so that a
client gets the verifier's own reason.
"""

import grpc

from servicekit.errors import ErrorTable, RequestError, code_number, find_code

#: When a client that was refused for lack of room or of a verifier should retry.
RETRY_AFTER_MS = 1_000

# A verifier that asks for more, whatever is wrong with it, would get no requests for weeks.
_MAX_RETRY_AFTER_MS = 30_000


class InvalidRequestError(RequestError):
    """The field's value is not acceptable."""


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens than it may have.

    The message begins as clients of the OpenAI API expect it that shorten a conversation, or go to
    another model: they do not always see the error's code.
    """

    def __init__(self, reason: str, *, field: str) -> None:
        super().__init__(f"the prompt is too long: {reason}", field=field)


class UnsupportedFieldError(RequestError):
    """The field is not supported (yet)."""


class UnauthenticatedError(RequestError):
    """The client's credentials are missing, wrong or expired."""


class PermissionDeniedError(RequestError):
    """The client may not do this."""


class OverloadedError(RequestError):
    """There is no room for this request now."""


class VerifierFullError(OverloadedError):
    """The verifier has no room for this request now."""


class UnreadError(OverloadedError):
    """The client does not read its output, or too slowly."""


class UnavailableError(RequestError):
    """No verifier can run this request now."""


class PreconditionError(RequestError):
    """The verifier lacks the state or the model that the request expects."""


class DraftTimeoutError(RequestError):
    """A sequence that always waits for drafts got none in time."""


class VerifierError(RequestError):
    """The verifier failed at this one request."""


ERROR_TABLE: ErrorTable = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedFieldError: grpc.StatusCode.UNIMPLEMENTED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    DraftTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    VerifierError: grpc.StatusCode.INTERNAL,
}

_ERROR_BY_CODE: dict[int, type[RequestError]] = {
    code_number(code): error
    for error, code in ERROR_TABLE.items()
    if issubclass(error, RequestError)
} | {code_number(grpc.StatusCode.RESOURCE_EXHAUSTED): VerifierFullError}

#: Every code that a failed request can end with, for metrics.
ERROR_CODES = sorted({code.name for code in ERROR_TABLE.values()})

# Fields of the verifier's Open that have other names in GenerateRequest.
_FIELD_OF_CLIENT = {
    "token_ids": "prompt",
    "prompt_length": "prompt",
    "expected_model_digest": "model_id",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
}


def shutting_down() -> UnavailableError:
    """The error of a request that comes too late."""
    return UnavailableError("the server is shutting down", retry_after_ms=RETRY_AFTER_MS)


def code_name(error: Exception) -> str:
    """The code that a client gets for an error, one of `ERROR_CODES`."""
    return (find_code(error, ERROR_TABLE) or grpc.StatusCode.INTERNAL).name


def from_verifier(*, code: int, message: str, field: str, retry_after_ms: int) -> RequestError:
    """The error of a sequence that its verifier rejected, with the client's name of the field.

    Args:
        code: a google.rpc.Code number; one that this table does not know is a VerifierError.
        message: the verifier's own, which is written for clients.
        field: a path in the verifier's Open.
        retry_after_ms: 0: none; at most half a minute counts.
    """
    error = _ERROR_BY_CODE.get(code, VerifierError)
    return error(
        message,
        field=client_field(field),
        retry_after_ms=min(retry_after_ms, _MAX_RETRY_AFTER_MS) or None,
    )


def client_field(field: str) -> str:
    """The client's name of a field of the verifier's Open."""
    return _FIELD_OF_CLIENT.get(field, field)
