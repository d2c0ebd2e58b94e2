"""Structured logs: one JSON object per line on stderr.

Owns the form of log lines and where they go. Standard output carries the ready line, so it has no
logs. Other libraries' lines, from the standard `logging`, get the same form. Log lines hold
identifiers and numbers, never the content of a request.
"""

import contextlib
import logging
import os
import secrets
import select
import stat
import sys
import threading
from typing import TextIO, cast

import structlog

#: A structured logger: methods `debug` to `exception`, each with an event name and key-value pairs.
Logger = structlog.typing.FilteringBoundLogger

LEVELS = ("debug", "info", "warning", "error")


# How long a line waits for the reader of a pipe that is full. The lines after it do not wait, until
# the reader reads again.
_PATIENCE_S = 0.1


class _LossyStream:
    """A stream whose lines are lost where it cannot be written: a full disk, a reader that is gone,
    or one that does not read. No request may fail or wait for that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        # Of a pipe, with the lock: its descriptor, whether its reader has stopped reading, and
        # whether the end of a line was lost.
        self._pipe: int | None = None
        self._is_stuck = self._is_cut = False
        with contextlib.suppress(OSError, ValueError):
            number = stream.fileno()
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                self._pipe = number

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._pipe is None:
                self._stream.write(text)
            # A collection of garbage in the midst of a line may log, too: that line is lost.
            elif self._lock.acquire(timeout=_PATIENCE_S):
                try:
                    self._write_to_pipe(self._pipe, text.encode("utf-8", "backslashreplace"))
                finally:
                    self._lock.release()

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _write_to_pipe(self, pipe: int, line: bytes) -> None:
        if self._is_cut:
            line = b"\n" + line
        for start in range(0, len(line), select.PIPE_BUF):
            patience_s = 0.0 if self._is_stuck else _PATIENCE_S
            # Then as many bytes can be written without waiting.
            self._is_stuck = not select.select([], [pipe], [], patience_s)[1]
            if self._is_stuck:
                self._is_cut |= start > 0
                return
            os.write(pipe, line[start : start + select.PIPE_BUF])
        self._is_cut = False


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
