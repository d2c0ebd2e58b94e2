"""The `tandem` command. Each subcommand is a module that adds its flags and runs.

Owns only the choice of subcommand. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

_COMMANDS = ("up", "generate")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serves large language models faster by n-gram speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if argv is None else argv
    # Only the chosen one: `tandem up` stays in memory, and needs no client.
    for name in given[:1] if given and given[0] in _COMMANDS else _COMMANDS:
        importlib.import_module(f"tandem.cli.{name}").add_parser(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


def _version() -> str:
    try:
        return f"tandem {importlib.metadata.version('tandem-serve')}"
    except importlib.metadata.PackageNotFoundError:
        return "tandem, not installed"
