"""Reads command lines of modules with their own parsers, and runs nothing.

    python -m tests.repository.parse_only < COMMANDS

COMMANDS is a JSON list of lists: module, arguments. Writes one JSON list of the same length: what
is wrong with each command, or null. One process for all, since their imports take seconds.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import servicekit.config


class _Parsed(BaseException):
    """The arguments are right. No handler of `Exception` keeps it."""


def main() -> None:
    parse_args, load_config = argparse.ArgumentParser.parse_args, servicekit.config.load_config

    def only_parse_args(*arguments: Any, **named: Any) -> None:
        parse_args(*arguments, **named)
        raise _Parsed

    def only_load_config(*arguments: Any, **named: Any) -> None:
        load_config(*arguments, **named, environ={})
        raise _Parsed

    argparse.ArgumentParser.parse_args = only_parse_args  # type: ignore[assignment, method-assign]
    servicekit.config.load_config = only_load_config  # type: ignore[assignment]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        errors = [_error(module, arguments) for module, *arguments in json.load(sys.stdin)]
    print(json.dumps(errors))


def _error(module: str, arguments: Sequence[str]) -> str | None:
    sys.argv = [module, *arguments]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except _Parsed:
        return None
    except SystemExit as end:
        return f"exit status {end.code}: {told.getvalue()[-500:]}" if end.code else None
    return "it did not read its arguments"


if __name__ == "__main__":
    main()
