"""Reads what the documentation shows to be typed: programs, and commands of a shell.

The documentation is the pages, and the docstrings of the Python client.

A fenced block marked `python` is a program, one marked `sh` a list of commands. A block without a
mark that follows at once is the output. A docstring's indented block is a program.
"""

import ast
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
)
DOCUMENTED = (REPOSITORY / "tandem/client.py", REPOSITORY / "tandem/drafts/drafter_client.py")

_BLOCK = re.compile(
    r"^```(?P<mark>sh|python)\n(?P<text>.*?)^```\n(?:\n```\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A program, or one command of a shell."""

    page: str
    """Path of the page in the repository, as `line` for messages and ids."""
    line: int
    text: str
    output: str | None = None
    """What it prints, if the page shows that."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without variables that are set for it."""
        words = shlex.split(self.text, comments=True)
        is_variable = re.compile(r"[A-Z_]+=.*").fullmatch
        return list(itertools.dropwhile(is_variable, words))


def programs() -> list[Shown]:
    return [shown for mark, shown in _blocks() if mark == "python"] + list(_docstring_programs())


def commands() -> list[Shown]:
    """The commands of all `sh` blocks. A block with an output has one command."""
    found = []
    for mark, block in _blocks():
        if mark == "sh":
            texts = list(_commands_of(block.text))
            assert block.output is None or len(texts) == 1, f"{block}: whose output is it?"
            found += [
                Shown(page=block.page, line=block.line, text=text, output=block.output)
                for text in texts
            ]
    return found


def inline_commands(program: str) -> list[Shown]:
    """The commands within sentences, in backticks, that begin with this program."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for text in re.findall(rf"`({program} [^`]+)`", line):
                found.append(Shown(page=_name(page), line=number, text=text))
    return found


def _blocks() -> Iterator[tuple[str, Shown]]:
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            yield (
                block["mark"],
                Shown(page=_name(page), line=line, text=block["text"], output=block["output"]),
            )


def _docstring_programs() -> Iterator[Shown]:
    for file in DOCUMENTED:
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        for block in re.finditer(r"^    .*(?:\n+    .*)*", text, re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 1
            yield Shown(page=_name(file), line=line, text=textwrap.dedent(block[0]) + "\n")


def _commands_of(block: str) -> Iterator[str]:
    """Joins lines until their quotes are closed and none ends in a backslash."""
    pending = ""
    for line in block.splitlines():
        pending += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
        if line.endswith("\\") or not _is_closed(pending):
            continue
        if shlex.split(pending, comments=True):
            yield pending.strip()
        pending = ""
    assert not pending.strip(), pending


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()
