"""What a stream of output can show, and text made safe for it.

Owns the rules: colours, live tables and control codes go to terminals alone; NO_COLOR
(https://no-color.org) and TERM=dumb switch colours off.
"""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console

# All but tab and line end: a model's text must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def drop_output() -> None:
    """Points stdout at /dev/null after its reader has gone: else Python's flush at exit fails and
    changes the exit code.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class OutputConsole(Console):
    """Raises BrokenPipeError where the reader of the stream is gone; rich exits."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output_console(plain_width: int) -> OutputConsole:
    """For stdout.

    Args:
        plain_width: of its lines where no terminal tells its own.
    """
    return OutputConsole(
        file=sys.stdout,
        width=None if is_live(sys.stdout) else plain_width,
        no_color=not has_colour(sys.stdout),
        highlight=False,
    )


def is_live(stream: TextIO | None) -> bool:
    """Whether lines on the stream can be drawn again. None: it is closed."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO | None) -> bool:
    return is_live(stream) and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """The text with control characters shown as their escapes."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextlib.contextmanager
def waiting_for(what: str, *, after_s: float = 0.0) -> Iterator[None]:
    """Shows on stderr what is waited for, if that is a terminal; nothing is left of it.

    Args:
        after_s: of shorter waits nothing is shown.
    """
    if not is_live(sys.stderr):
        yield
        return
    console = Console(file=sys.stderr, no_color=not has_colour(sys.stderr), highlight=False)
    status = console.status(f"waiting for {what}", spinner="line")
    timer = threading.Timer(after_s, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # It may be at work just now.
        timer.join()
        status.stop()


def report(command: str, message: str) -> None:
    """Prints one line on stderr, in one write: other processes may write there too.

    It is lost if stderr cannot be written, as when its terminal or its reader is gone.

    Args:
        message: made printable, since it may hold a server's text.
    """
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"tandem {command}: {printable(' '.join(message.split()))}\n")
        sys.stderr.flush()
