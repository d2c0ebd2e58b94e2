"""Writes docs/client.md: the reference of `tandem.client`, made of its docstrings.

After a change of these:

    python -m tests.client.api_page
"""

import re
import textwrap
from collections.abc import Iterator

import griffe

from tests.client.public_surface import REPOSITORY, exported, load_client, public_members, show

FILE = REPOSITORY / "docs" / "client.md"

_HEAD = """\
# The Python client

Made of the docstrings of `tandem.client` by `python -m tests.client.api_page`.

"""

# By the module that defines them, in this order; within a module, as in its source.
_SECTIONS = {
    "tandem.client": "Clients of a gateway",
    "tandem.retry": "Failures",
    "tandem.channel": "TLS",
    "tandem.generation": "Requests, events and results",
    "tandem.drafter_client": "Clients of a drafter",
    "tandem.drafting": "Queries to a drafter",
}


def render() -> str:
    client = load_client()
    lines = [_HEAD, *_text(client)]
    for module, title in _SECTIONS.items():
        members = [member for member in exported(client) if member.module.path == module]
        lines.append(f"## {title}\n\n")
        if module == "tandem.drafter_client":
            lines += _text(members[0].module)
        for member in sorted(members, key=lambda member: member.lineno or 0):
            lines += _member(member)
    return "".join(lines).rstrip() + "\n"


def _member(member: griffe.Class | griffe.Attribute) -> Iterator[str]:
    yield f"### {member.name}\n\n"
    if isinstance(member, griffe.Attribute):
        yield f"`{member.name} = {member.value}`\n\n"
        yield from _text(member)
        return
    yield from _text(member)
    members = public_members(member)
    attributes = [each for each in members if isinstance(each, griffe.Attribute)]
    described = {
        getattr(item, "name", "") for section in _sections(member) for item in _items(section)
    }
    bullets = [_bullet(each) for each in attributes if each.name not in described]
    yield from bullets
    yield "\n" * bool(bullets)
    for function in members:
        if isinstance(function, griffe.Function):
            shown = show(function)
            if function.name == "__init__":
                shown = shown.replace("__init__", member.name).removesuffix(" -> None")
            yield f"**`{shown}`**\n\n"
            yield from _text(function)


def _bullet(attribute: griffe.Attribute) -> str:
    text = f": {_one_line(attribute.docstring.value)}" if attribute.docstring else ""
    return f"- `{show(attribute).removeprefix('property ')}`{text}\n"


def _text(documented: griffe.Object) -> Iterator[str]:
    """A docstring in Markdown."""
    for section in _sections(documented):
        if isinstance(section, griffe.DocstringSectionText):
            yield f"{_with_fences(section.value)}\n\n"
            continue
        for item in _items(section):
            name = getattr(item, "name", "")
            subject = f"`{name}`" if name else f"Raises `{item.annotation}`"
            yield f"- {subject}: {_one_line(item.description)}\n"
        yield "\n"


def _with_fences(text: str) -> str:
    """Marks indented programs as Python, so that they are coloured, and run by a test."""
    program = re.compile(r"^    .*(?:\n+    .*)*", re.MULTILINE)
    return program.sub(lambda found: f"```python\n{textwrap.dedent(found[0])}\n```", text)


def _sections(documented: griffe.Object) -> list[griffe.DocstringSection]:
    return documented.docstring.parsed if documented.docstring else []


def _items(section: griffe.DocstringSection) -> list[griffe.DocstringElement]:
    """The described parameters, attributes or exceptions of a section."""
    return section.value if isinstance(section.value, list) else []


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    FILE.write_text(render())
