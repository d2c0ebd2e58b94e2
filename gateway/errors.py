"""What can go wrong with a request to the gateway, and the status that each becomes.

    RequestError
    ├── InvalidRequestError     INVALID_ARGUMENT     the caller's mistake, in `field`
    ├── UnsupportedFieldError   UNIMPLEMENTED        a field that cannot be honoured (yet)
    ├── OverloadedError         RESOURCE_EXHAUSTED   no room; `retry_after_ms` says when to return
    ├── UnavailableError        UNAVAILABLE          no verifier, or it went away, or draining
    ├── PreconditionError       FAILED_PRECONDITION  the verifier is not what the request expects
    ├── DraftTimeoutError       DEADLINE_EXCEEDED    draft_wait=always, and no draft came
    └── VerifierError           INTERNAL             the verifier failed at this request

A sequence that its verifier rejects carries a canonical code and a field: `from_verifier` turns
them into one of these, so a client hears the verifier's own reason.
"""

import grpc

from servicekit.errors import ErrorTable, RequestError, code_number, find_code

#: When a client that found no room, or no verifier, may sensibly come back.
RETRY_AFTER_MS = 1_000


class InvalidRequestError(RequestError):
    """The field's value is not acceptable."""


class UnsupportedFieldError(RequestError):
    """The field's capability is not there (yet)."""


class OverloadedError(RequestError):
    """There is no room for this request now."""


class UnavailableError(RequestError):
    """Nobody can run this request now."""


class PreconditionError(RequestError):
    """The verifier is not in the state, or does not serve the model, that the request expects."""


class DraftTimeoutError(RequestError):
    """A sequence that always waits for drafts got none within the verifier's patience."""


class VerifierError(RequestError):
    """The verifier failed at this one request."""


ERROR_TABLE: ErrorTable = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedFieldError: grpc.StatusCode.UNIMPLEMENTED,
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
}

#: Every code that a failed request can end with, for metrics.
ERROR_CODES = sorted({code.name for code in ERROR_TABLE.values()})

# Fields of the verifier's Open whose values come from a field of another name in GenerateRequest.
_FIELD_OF_CLIENT = {
    "token_ids": "prompt",
    "prompt_length": "prompt",
    "expected_model_digest": "model_id",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
}


def code_name(error: Exception) -> str:
    """The code that a client hears of an error, one of `ERROR_CODES`."""
    return (find_code(error, ERROR_TABLE) or grpc.StatusCode.INTERNAL).name


def from_verifier(*, code: int, message: str, field: str, retry_after_ms: int) -> RequestError:
    """The error of a sequence that its verifier rejected, with the client's name of the field.

    Args:
        code: a google.rpc.Code number; one that this table does not know is a VerifierError.
        message: the verifier's words; they were written for callers.
        field: path within the verifier's Open; its `sampling.min_p` is the client's too.
        retry_after_ms: 0 for no advice.
    """
    error = _ERROR_BY_CODE.get(code, VerifierError)
    return error(
        message,
        field=client_field(field),
        retry_after_ms=retry_after_ms or None,
    )


def client_field(field: str) -> str:
    """The client's name of a field of the verifier's Open."""
    return _FIELD_OF_CLIENT.get(field, field)
