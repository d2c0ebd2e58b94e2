"""Writes docs/cli.md: the reference of the `tandem` command, made of what `--help` shows.

After a change of a flag, its help or an example:

    python -m tests.cli.cli_page
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

from tandem.cli import COMMANDS, build_app

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "docs" / "cli.md"

_HEAD = """\
# The command line

Made of the commands' own help by `python -m tests.cli.cli_page`.

In a checkout of Tandem, `pip install '.[cli]'` installs the `tandem` command, and
`pip install -e '.[all]'` the services that `tandem up` starts, too. `tandem COMMAND --help` shows
its part of this page, and `tandem --install-completion` lets the shell complete commands and flags.
Output goes to stdout, everything else to stderr. Colours and live tables appear on terminals only,
and no colours where the variable `NO_COLOR` is set. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted by Ctrl-C, which ends `up` as it should: with 0. An error is one line that names the
command, and the flag if one is wrong.
"""


def click_commands() -> dict[str, Any]:
    """What typer made of each subcommand."""
    group: Any = typer.main.get_command(build_app())
    return {name: group.commands[name] for name in COMMANDS}


def examples(command: Any) -> list[str]:
    lines: list[str] = command.epilog.split("\n\n")[1:]
    return lines


def render() -> str:
    lines = [_HEAD]
    for name, command in click_commands().items():
        arguments = "".join(
            f" [{each.metavar}]" for each in command.params if each.param_type_name == "argument"
        )
        help_text = inspect.cleandoc(command.help).replace("<", "\\<")
        lines += [
            f"\n## tandem {name}\n\n`tandem {name} [FLAGS]{arguments}`\n\n{help_text}\n\n",
            "```sh\n" + "\n".join(examples(command)) + "\n```\n\n",
            "| Flag | Meaning |\n|---|---|\n",
            *_rows(command.params),
        ]
    return "".join(lines)


def _rows(parameters: list[Any]) -> Iterator[str]:
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            flag = parameter.metavar
        else:
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            flag = names if parameter.is_flag else f"{names} {_value(parameter)}"
        meaning = parameter.help or ""
        if parameter.show_default and parameter.default not in (None, False, "", ()):
            meaning += f" (default: {parameter.default})"
        cells = (cell.replace("|", "\\|") for cell in (f"`{flag}`", meaning))
        yield f"| {' | '.join(cells)} |\n"


def _value(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return str(parameter.name).rpartition("_")[2].upper()


if __name__ == "__main__":
    FILE.write_text(render())
