"""SIGTERM for commands that have temporary files: they end as by Ctrl-C, and clear up."""

import signal
import sys


def clear_up_on_sigterm() -> None:
    """Makes SIGTERM raise `SystemExit` in the main thread, which is the caller."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
