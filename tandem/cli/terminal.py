"""What a stream of output can show, and text made safe for it.

Owns the rules: colours, live tables and control codes go to terminals alone; NO_COLOR
(https://no-color.org) and TERM=dumb switch colours off.
"""

import os
import re
import sys
from typing import TextIO

# All but tab and line end: a model's text must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_live(stream: TextIO) -> bool:
    """Whether lines on the stream can be drawn again."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    return is_live(stream) and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """The text with control characters shown as their escapes."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def report(command: str, message: str) -> None:
    """Prints one line on stderr, in one write: other processes may write there too.

    Args:
        message: made printable, since it may hold a server's text.
    """
    sys.stderr.write(f"tandem {command}: {printable(' '.join(message.split()))}\n")
    sys.stderr.flush()
