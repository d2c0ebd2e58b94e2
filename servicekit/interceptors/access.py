"""Who may call: decided before a call's request is received.

The server's options say which certificates may call at all; a service's function knows more, such
as tokens. Health checks are open to everybody.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from servicekit.errors import ErrorTable, RequestError, to_status
from servicekit.interceptors.base import (
    HEALTH_PREFIX,
    CallFailedError,
    CallInterceptor,
    Context,
    Handler,
    behaviour_of,
    rebuild,
)
from servicekit.interceptors.callers import Caller, caller_of


class CallerNotAllowedError(RequestError):
    """The caller's certificate has no name that may call."""


def check_names(caller: Caller, allowed: Sequence[str]) -> None:
    """Refuses a caller whose certificate has none of the allowed names.

    Args:
        allowed: names, or patterns: `*.` at the beginning stands for one label.

    Raises:
        CallerNotAllowedError: it has none.
    """
    if not any(_matches(name, each) for name in caller.certificate_names for each in allowed):
        names = ", ".join(caller.certificate_names) or "none"
        raise CallerNotAllowedError(f"no name of the client's certificate may call: {names}")


class AccessInterceptor(CallInterceptor):
    """Refuses the callers who may not call."""

    def __init__(
        self,
        *,
        allowed_clients: Sequence[str],
        admit: Callable[[Caller], object] | None,
        error_table: ErrorTable,
    ) -> None:
        """Args:
        allowed_clients: names of certificates that may call, see `check_names`; empty: all.
        admit: raises an exception of the table for a caller who may not call; None: all may.
        error_table: which exception becomes which status.
        """
        super().__init__()
        self._allowed_clients = allowed_clients
        self._admit = admit
        self._error_table: ErrorTable = {
            **error_table,
            CallerNotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
        }

    def wrap(self, handler: Handler, method: str) -> Handler:
        if method.startswith(HEALTH_PREFIX):
            return handler
        inner = behaviour_of(handler)

        async def with_access(request: Any, context: Context) -> Any:
            try:
                caller = caller_of(context)
                if self._allowed_clients:
                    check_names(caller, self._allowed_clients)
                if self._admit is not None:
                    self._admit(caller)
            except Exception as error:
                raise CallFailedError(to_status(error, self._error_table)) from error
            return await inner(request, context)

        return rebuild(handler, with_access, handler.request_deserializer)


def _matches(name: str, pattern: str) -> bool:
    # Names of the DNS have no case.
    name, pattern = name.lower(), pattern.lower()
    if not pattern.startswith("*."):
        return name == pattern
    label, _, parent = name.partition(".")
    return bool(label) and parent == pattern.removeprefix("*.")
