"""Structured logs: one JSON object per line on stderr.

Owns the form of log lines and where they go. Standard output carries the ready line, so it has no
logs. Other libraries' lines, from the standard `logging`, get the same form. Log lines hold
identifiers and numbers, never the content of a request.
"""

import contextlib
import logging
import secrets
import sys
from typing import TextIO, cast

import structlog

#: A structured logger: methods `debug` to `exception`, each with an event name and key-value pairs.
Logger = structlog.typing.FilteringBoundLogger

LEVELS = ("debug", "info", "warning", "error")


class _LossyStream:
    """A stream whose lines are lost where it cannot be written: a full disk, a reader that is gone.
    No request may fail for that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure_logs(level: str, service: str) -> None:
    """Sends all log lines of this process, as JSON, to stderr.

    A line holds `ts` (UTC, ISO 8601), `level`, `event`, `service`, `logger`, bound values (the
    request id), and `exception` with the traceback.

    Args:
        level: one of LEVELS; lines below it are dropped.
        service: this process's name, on every line.

    Raises:
        ValueError: unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not one of {', '.join(LEVELS)}")

    def add_names(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        if "logger_name" in event:  # `logger` itself is a parameter of structlog's
            event["logger"] = event.pop("logger_name")
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        add_names,
        structlog.processors.format_exc_info,
    ]
    ordered = structlog.processors.JSONRenderer()

    def first_keys_first(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        heads = {key: event.pop(key) for key in _FIRST_KEYS if key in event}
        return {**heads, **event}

    stream = cast(TextIO, _LossyStream(sys.stderr))
    structlog.configure(
        processors=[*shared, first_keys_first, ordered],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                first_keys_first,
                ordered,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def get_logger(name: str) -> Logger:
    """A logger whose lines have `logger: name`; may be made before `configure_logs`."""
    return cast(Logger, structlog.get_logger(logger_name=name))


def request_id() -> str:
    """The request id of the call that the current task answers; "" if none."""
    return str(structlog.contextvars.get_contextvars().get(_REQUEST_ID, ""))


def adopt_request_id(given: str) -> str:
    """Binds and returns the id of the current call, for all of its later log lines.

    Args:
        given: the id in the request itself; "" keeps the id of the call's metadata, or makes one.
    """
    adopted = given or request_id() or secrets.token_hex(16)
    structlog.contextvars.bind_contextvars(**{_REQUEST_ID: adopted})
    return adopted


_REQUEST_ID = "request_id"
_FIRST_KEYS = ("ts", "level", "event", "service", "logger", _REQUEST_ID)
