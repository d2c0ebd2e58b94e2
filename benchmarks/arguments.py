"""Commands' arguments: those that some share, and how a command's JSON states them."""

import argparse
from pathlib import Path

from benchmarks.workloads import BUNDLED_MODEL

# Where it writes, which changes no figure.
_OUTPUTS = ("json", "png")


def add_measured(parser: argparse.ArgumentParser) -> None:
    """Adds what is measured where Tandem is compared with transformers."""
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="checkpoint folder")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="auto: the checkpoint's",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the model, in both systems")
    parser.add_argument("--prompts", type=int, default=32, help="rename prompts, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=3)


def stated(arguments: argparse.Namespace) -> dict[str, object]:
    """All arguments by name, defaults included; paths as text: what was measured."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in _OUTPUTS
    }
