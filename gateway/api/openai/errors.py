"""Errors in OpenAI's form: an HTTP status and `{"error": {message, type, param, code}}`.

Owns the status of each error of the gateway, and OpenAI's names of the gateway's fields.
"""

import json
import math
import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import PromptTooLongError, code_name
from servicekit.errors import RequestError

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# By gRPC's name of the code: status, type, code. The official client repeats requests that end
# with 408, 409, 429 or 5xx: an unsupported field is 400, so that it does not.
_FORM_OF_CODE: Mapping[str, tuple[int, str, str]] = {
    "INVALID_ARGUMENT": (400, _INVALID, "invalid_value"),
    "UNIMPLEMENTED": (400, _INVALID, "unsupported_parameter"),
    "UNAUTHENTICATED": (401, "authentication_error", "invalid_api_key"),
    "PERMISSION_DENIED": (403, "permission_error", "permission_denied"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "rate_limit_exceeded"),
    "UNAVAILABLE": (503, _SERVER, "unavailable"),
    "FAILED_PRECONDITION": (503, _SERVER, "unavailable"),
    "DEADLINE_EXCEEDED": (504, _SERVER, "timeout"),
    "INTERNAL": (500, _SERVER, "internal_error"),
}

# Of refusals that only HTTP has; of all others it is INVALID_ARGUMENT.
_NAME_OF_STATUS: Mapping[int, str] = {403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}

_PARAM_OF_FIELD: Mapping[str, str] = {
    "model_id": "model",
    "text": "prompt",
    "tokens.token_ids": "prompt",
    "stop_sequences": "stop",
    "max_new_tokens": "max_tokens",
    "trace": "speculation.report",
    "sampling.min_new_tokens": "min_tokens",
    "sampling.prompt_logprobs": "logprobs",
    "sampling.structured_output": "structured_outputs",
}


# In characters: both may quote what a client sent.
_MAX_MESSAGE = 2048
_MAX_PARAM = 256


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the caller.
        kind: OpenAI's `type`.
        code: a stable name of the reason; None: there is none.
        param: the parameter at fault; None: not one.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> str:
        """The answer's JSON."""
        error = {
            "message": self.message[:_MAX_MESSAGE],
            "type": self.kind,
            "param": None if self.param is None else self.param[:_MAX_PARAM],
            "code": self.code,
        }
        return json.dumps({"error": error})

    def response(self) -> Response:
        """The answer."""
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def to_api_error(error: Exception, *, renamed_params: Mapping[str, str] | None = None) -> ApiError:
    """The answer to an error of a request.

    An error that the gateway's table does not know becomes `internal error`: its own text was not
    written for callers.

    Args:
        renamed_params: see `Job`.
    """
    if isinstance(error, ApiError):
        return error
    status, kind, code = _FORM_OF_CODE[code_name(error)]
    if not isinstance(error, RequestError):
        return ApiError(status, "internal error", kind=kind, code=code)
    param = _param(error.field)
    if param == "model" and status == 400:
        status, code = 404, "model_not_found"
    if isinstance(error, PromptTooLongError):
        # Clients that shorten a conversation look for it.
        code = "context_length_exceeded"
    renamed = renamed_params or {}
    if param is not None and param in renamed:
        param = renamed.get(f"{param}/{code}", renamed[param])
    headers = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return ApiError(
        status,
        error.message,
        kind=kind,
        code=code,
        param=param,
        headers=headers,
    )


def name_of_code(error: Exception) -> str:
    """The name of an error's gRPC code, also of an error that only HTTP has: those are refusals of
    callers, of bodies and of what they say.
    """
    if not isinstance(error, ApiError):
        return code_name(error)
    if error.code == "unsupported_parameter":
        return "UNIMPLEMENTED"
    return _NAME_OF_STATUS.get(error.status, "INVALID_ARGUMENT")


async def http_error(request: Request, error: Exception) -> Response:
    """The answer to a request of an unknown path or method; Starlette's exception handler."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


def _param(field: str) -> str | None:
    """OpenAI's name of a field of the gateway's request."""
    name = re.sub(r"\[.*|(?<=^sampling\.structured_output)\..*", "", field)
    return _PARAM_OF_FIELD.get(name, name.removeprefix("sampling.")) or None
