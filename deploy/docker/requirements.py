"""Prints the requirements of extras: `python requirements.py pyproject.toml drafter otel`.

Follows extras of Tandem itself. Tandem is not printed: an image holds the folders of one service,
not the whole distribution.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# `tandem-serve[servicekit,drafter]`: the distribution's own extras.
_OWN = re.compile(r"\[([^\]]*)\]")


def requirements(project: dict[str, Any], extra: str) -> Iterator[str]:
    """The requirements of an extra, without those of every client.

    Raises:
        KeyError: there is no such extra.
    """
    for requirement in project["optional-dependencies"][extra]:
        if not requirement.startswith(project["name"]):
            yield requirement
            continue
        own = _OWN.search(requirement)
        for name in own[1].split(",") if own else ():
            yield from requirements(project, name.strip())


def main() -> None:
    """Prints one requirement per line."""
    pyproject, *extras = sys.argv[1:]
    project = tomllib.loads(Path(pyproject).read_text())["project"]
    of_extras = [each for extra in extras for each in requirements(project, extra)]
    for requirement in [*project["dependencies"], *of_extras]:
        print(requirement)


if __name__ == "__main__":
    main()
