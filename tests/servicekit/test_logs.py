"""Logs: one JSON object per line, on stderr, from us and from other libraries."""

import datetime
import errno
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from servicekit.logs import configure_logs, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


class FullDisk(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "no space left")


def test_a_line_that_cannot_be_written_is_lost_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    configure_logs("info", "thing")
    get_logger("thing.part").info("opened")
    try:
        raise ValueError("an error")
    except ValueError:
        get_logger("thing.part").exception("failed")
    monkeypatch.setattr(logging, "raiseExceptions", True)
    logging.getLogger("library").error("said")


def test_lines_are_lost_while_the_reader_of_a_pipe_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as taken, os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logs("info", "thing")
        began_s = time.monotonic()
        # More than a pipe holds; a write that waits for its reader would never end.
        for number in range(300):
            get_logger("thing.part").info("opened", number=number, text="x" * 10_000)
        assert time.monotonic() - began_s < 10, "one line waits, and no other one"
        os.set_blocking(reader, False)
        got = b""
        while chunk := taken.read(1 << 20):
            got += chunk
        for event in ("read again", "and again"):
            get_logger("thing.part").info(event)
        got += taken.read(1 << 20) or b""
    *whole, cut, read_again, last = got.decode().splitlines()
    assert [json.loads(line)["number"] for line in whole] == list(range(len(whole)))
    assert len(whole) >= 5
    assert cut.startswith('{"ts"')
    assert json.loads(read_again)["event"] == "read again"
    assert json.loads(last)["event"] == "and again"


def test_what_logs_in_the_midst_of_a_line_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a collection of garbage may, that finds a task whose exception nobody took."""
    reader, writer = os.pipe()
    choose = select.select
    has_logged = threading.Event()

    def log_and_select(*arguments: Any) -> Any:
        if not has_logged.is_set():
            has_logged.set()
            logging.getLogger("asyncio").error("never retrieved")
            other.start()
        return choose(*arguments)

    with os.fdopen(reader, "rb") as taken, os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logs("info", "thing")
        other = threading.Thread(target=lambda: logging.getLogger("other").error("beside"))
        monkeypatch.setattr(select, "select", log_and_select)
        get_logger("thing.part").info("opened")
        other.join()
        get_logger("thing.part").info("closed")
        os.set_blocking(reader, False)
        events = [json.loads(line)["event"] for line in taken.read(1 << 20).splitlines()]
    assert set(events) >= {"opened", "beside", "closed"}


def test_a_line_is_one_json_object_that_says_when_what_and_who(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = get_logger("thing.part")  # made before the logs are configured
    configure_logs("info", "thing")
    logger.info("opened", size=3, text="two\nlines")
    (line,) = lines(capsys)
    when = datetime.datetime.fromisoformat(line.pop("ts"))
    assert abs(datetime.datetime.now(datetime.UTC) - when) < datetime.timedelta(minutes=1)
    assert list(line.items()) == [
        ("level", "info"),
        ("event", "opened"),
        ("service", "thing"),
        ("logger", "thing.part"),
        ("size", 3),
        ("text", "two\nlines"),
    ]


def test_other_libraries_lines_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "thing")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("grpc._cython.cygrpc").exception("Unexpected %s", "x")
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["service"], line["logger"]) == (
        "Unexpected x", "error", "thing", "grpc._cython.cygrpc",
    )  # fmt: skip
    assert "ValueError: broken" in line["exception"]
    assert "ts" in line


def test_what_json_cannot_hold_is_written_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", "thing")
    get_logger("thing").info("odd", what={1}, lone="\ud800", nan=float("nan"))
    (line,) = lines(capsys)
    assert line["what"] == "{1}"
