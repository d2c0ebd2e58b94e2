"""Every command's help, which is its reference: it shows examples, and they are right."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.cli import COMMANDS, build_app, main

REPOSITORY = Path(__file__).resolve().parents[2]


def click_commands() -> dict[str, Any]:
    """What typer made of each subcommand."""
    group: Any = typer.main.get_command(build_app())
    return {name: group.commands[name] for name in COMMANDS}


def examples_of(command: Any) -> list[str]:
    lines: list[str] = command.epilog.split("\n\n")[1:]
    return lines


_COMMANDS = click_commands()
_EXAMPLES = [example for command in _COMMANDS.values() for example in examples_of(command)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_of_the_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    examples = examples_of(_COMMANDS[name])
    assert examples
    for example in examples:
        assert f"tandem {name}" in example
        assert example in output


@pytest.mark.parametrize("example", _EXAMPLES)
def test_every_example_is_right_usage(example: str) -> None:
    words = shlex.split(example)
    _, name, *arguments = words[words.index("tandem") :]
    _COMMANDS[name].make_context(name, arguments)


def test_wrong_usage_is_one_line_that_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "ren", "--temperature", "warm"])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem generate: ")
    assert "--temperature" in line


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve"])
    [line] = capsys.readouterr().err.splitlines()
    assert line == "tandem: No such command 'serve'. (see tandem --help)"


@pytest.mark.parametrize("arguments", [["--version"], ["doctor", "--help"]])
def test_a_full_disk_below_stdout_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("tandem")
    assert line.endswith("No space left on device")


def test_without_the_packages_of_the_extra_the_command_says_so_and_the_client_works() -> None:
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('typer', 'rich'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import tandem.client, tandem.local, tandem.cli\n"
        "sys.exit(tandem.cli.main(['generate', 'ren']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 2
    assert done.stderr == (
        "tandem: the command line needs typer, rich: pip install 'tandem-serve[cli]'\n"
    )
