"""The command of whatever generates committed files: writes them, or says what is out of date."""

import argparse
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(description: str, files: Mapping[Path, str]) -> int:
    """Runs the command; returns its exit code, 1 if a file is out of date.

    Args:
        description: for `--help`.
        files: what each should hold.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    is_check = parser.parse_args().check
    is_outdated = False
    for path, wanted in files.items():
        if not is_check:
            path.write_text(wanted)
            continue
        found = path.read_text() if path.exists() else ""
        is_outdated |= found != wanted
        sys.stdout.writelines(
            difflib.unified_diff(
                found.splitlines(keepends=True),
                wanted.splitlines(keepends=True),
                fromfile=path.name,
                tofile="generated",
            )
        )
    return int(is_outdated)
