"""The `tandem` command. Each subcommand is a module with its flags, `EXAMPLES` and `command`.

Owns the choice of subcommand and how a wrong use is told. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = ("up", "generate", "bench", "doctor", "pool")

_INTERRUPTED = 130
# Modules that the extra `cli` installs, by their package; the client alone needs none of them.
_PACKAGES = {"typer": "typer", "rich": "rich"}

# Features that other systems have a flag for and that are out of Tandem's scope.
_OUT_OF_SCOPE = {
    "--num-beams": "beam search",
    "--tree-width": "drafts that branch",
    "--lora": "adapters (LoRA)",
    "--adapter": "adapters (LoRA)",
    "--image": "images, sound and video",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    Raises:
        SystemExit: wrong usage, with code 2.
    """
    if missing := [name for name, module in _PACKAGES.items() if not _is_installed(module)]:
        print(
            f"tandem: the command line needs {', '.join(missing)}: pip install 'tandem-serve[cli]'",
            file=sys.stderr,
        )
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's text may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Of a refused handshake, gRPC logs lines beside the error that it returns.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import typer

    given = sys.argv[1:] if argv is None else list(argv)
    # Only the chosen one: `tandem up` stays in memory, and needs no client.
    chosen = given[0] if given and given[0] in COMMANDS else None
    prog = "tandem" if chosen is None else f"tandem {chosen}"
    try:
        result = build_app([chosen] if chosen else COMMANDS)(
            given, standalone_mode=False, prog_name="tandem"
        )
    except typer.TyperException as error:
        print(f"{prog}: {_one_line(error)} (see {prog} --help)", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except OSError as error:
        # What no command expects, such as a full disk below stdout.
        from tandem.cli.terminal import drop_output

        drop_output()
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return int(result or 0)


def build_app(names: Iterable[str] = COMMANDS) -> "typer.Typer":
    """The command line with these subcommands."""
    import typer

    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")

    def tandem(
        version: bool = typer.Option(
            False,
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ) -> None:
        """Serves large language models faster by n-gram speculative decoding."""

    app.callback()(tandem)
    for name in names:
        module = importlib.import_module(f"tandem.cli.{name}")
        lines = ["Examples:", *module.EXAMPLES]
        app.command(name, epilog="\n\n".join(lines))(module.command)
    return app


def version() -> str:
    """The version of the installed distribution; "not installed" in a bare source tree."""
    try:
        return importlib.metadata.version("tandem-serve")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        print(f"tandem {version()}")
        raise typer.Exit


def _one_line(error: "typer.TyperException") -> str:
    option = getattr(error, "option_name", None)
    if option in _OUT_OF_SCOPE:
        return f"{option}: Tandem does not do {_OUT_OF_SCOPE[option]}"
    return " ".join(error.format_message().split())
