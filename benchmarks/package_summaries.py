"""A summarisation task without a download: the readmes of the packages in constraints.txt.

A prompt is the beginning of a package's long description and a question; the reference is `Summary`
of its metadata. Nearly all summaries are new text; a few occur in the readme word for word. Only
packages installed in the pinned version count, so the same pins give the same task everywhere.
"""

import importlib.metadata
import re
from pathlib import Path

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
# Of a readme; at most 1,700 tokens of the bundled tokenizer.
_MAX_CHARS = 3000
_MIN_CHARS = 400
_QUESTION = "\n\nIn one sentence, what is {name}?\n\n"


def pinned_packages() -> tuple[list[importlib.metadata.Distribution], list[str]]:
    """Returns the packages in the order of constraints.txt, and the names of those that are not
    installed in the pinned version.
    """
    found, missing = [], []
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", _CONSTRAINTS.read_text(), re.MULTILINE):
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if package.version.split("+")[0] == version:
            found.append(package)
        else:
            missing.append(name)
    return found, missing


def summary_tasks() -> list[dict[str, str]]:
    """One `prompt` and `reference` for each package that has both."""
    tasks = []
    for package in pinned_packages()[0]:
        metadata = package.metadata.json
        readme, summary = str(metadata.get("description", "")), metadata.get("summary")
        if summary and len(readme) >= _MIN_CHARS:
            prompt = readme[:_MAX_CHARS] + _QUESTION.format(name=metadata["name"])
            tasks.append({"prompt": prompt, "reference": str(summary)})
    return tasks
