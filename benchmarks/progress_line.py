"""What a benchmark does now: a line on stderr that the next one replaces; in a terminal only."""

import os
import shutil
import sys


def show(text: str) -> None:
    """Replaces the line."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:width]}")
        sys.stderr.flush()


def clear() -> None:
    """Leaves nothing of it."""
    show("")
