"""What the commands' arguments have in common, and how a command's JSON states them."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from benchmarks.workloads import BUNDLED_MODEL


def command_parser(command: str, documentation: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.COMMAND`, with `--quick` and `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="hardly anything, to see it work")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and `--threads`."""
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument("--threads", type=int, default=1, help="of the model")


def write_figures(command: str, arguments: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Writes the file of `--json`, if it is asked for: the command, where it ran, its figures."""
    if arguments.json is None:
        return
    stated = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name != "json"
    }
    run = {
        "command": f"python -m benchmarks.{command}",
        **stated,
        "processor": processor(),
        **figures,
    }
    arguments.json.write_text(json.dumps(run, indent=1) + "\n")
