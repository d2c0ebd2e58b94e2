"""Which span of a caller a call is part of: W3C's `traceparent`.

Owns its form, and where the current call's is kept. Imports no OpenTelemetry: a process that traces
nothing needs none.
"""

import contextvars
import re

#: The header of HTTP, and the key of gRPC's metadata.
TRACE_PARENT_KEY = "traceparent"

# Longer ones are of versions to come.
_MAX_CHARACTERS = 64

# https://www.w3.org/TR/trace-context/: version, trace id, span id, flags. Neither id is zero.
_FORM = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

_of_caller: contextvars.ContextVar[str] = contextvars.ContextVar("trace_parent", default="")


def is_trace_parent(text: str) -> bool:
    """Whether this names a span."""
    return len(text) <= _MAX_CHARACTERS and _FORM.fullmatch(text) is not None


def bind_trace_parent(given: str) -> None:
    """Keeps a caller's span for the current task and those it starts; none if it is malformed."""
    _of_caller.set(given if is_trace_parent(given) else "")


def caller_trace_parent() -> str:
    """The caller's span of the current call; "" if none."""
    return _of_caller.get()
