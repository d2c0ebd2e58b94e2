"""A command's arguments, as its JSON states them: what was measured."""

import argparse
from pathlib import Path

# Where it writes, which changes no figure.
_OUTPUTS = ("json", "png")


def stated(arguments: argparse.Namespace) -> dict[str, object]:
    """All arguments by name, defaults included; paths as text."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in _OUTPUTS
    }
