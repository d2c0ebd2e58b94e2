"""Describes the public surface of `tandem.client`, one line per class, attribute and method.

`public_surface.txt` beside this file is the frozen description. After a deliberate change:

    python -m tests.client.public_surface > tests/client/public_surface.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

REPOSITORY = Path(__file__).resolve().parents[2]


def load_client() -> griffe.Module:
    """`tandem.client`, read from its source without importing it."""
    client = griffe.load(
        "tandem.client",
        search_paths=[REPOSITORY],
        resolve_aliases=True,
        docstring_parser="google",
    )
    assert isinstance(client, griffe.Module)
    return client


def exported(client: griffe.Module) -> list[griffe.Class | griffe.Attribute]:
    """What the module exports, in the order of `__all__`."""
    assert client.exports is not None
    found = [_resolve(client[str(name)]) for name in client.exports]
    return [each for each in found if isinstance(each, griffe.Class | griffe.Attribute)]


def public_members(owner: griffe.Class) -> list[griffe.Attribute | griffe.Function]:
    """The attributes and methods that callers may use, in their order.

    Without what every dataclass or context manager has.
    """
    is_dataclass = "dataclass" in owner.labels
    members = [
        _resolve(member)
        for name, member in owner.members.items()
        if not name.startswith("_") or (name == "__init__" and not is_dataclass)
    ]
    return [each for each in members if isinstance(each, griffe.Attribute | griffe.Function)]


def show(member: griffe.Attribute | griffe.Function) -> str:
    """A member as one reads it in Python, e.g. `async close() -> None`."""
    if isinstance(member, griffe.Function):
        return "async " * ("async" in member.labels) + str(member.signature())
    kind = "property " * ("property" in member.labels)
    annotation = "" if member.annotation is None else f": {member.annotation}"
    # The value of an attribute that `__init__` sets is no part of the surface.
    is_default = member.value is not None and "class-attribute" in member.labels
    return f"{kind}{member.name}{annotation}" + (f" = {member.value}" if is_default else "")


def describe() -> str:
    return "".join(f"{line}\n" for member in exported(load_client()) for line in _lines(member))


def _lines(member: griffe.Class | griffe.Attribute) -> Iterator[str]:
    if isinstance(member, griffe.Attribute):
        yield f"type {member.name} = {member.value}"
        return
    bases = ", ".join(map(str, member.bases))
    decorators = "".join(f"@{decorator.value} " for decorator in member.decorators)
    managers = [name for name in ("__enter__", "__aenter__") if name in member.members]
    yield " ".join([f"{decorators}class {member.name}({bases})", *managers])
    for each in public_members(member):
        yield f"    {member.name}: {show(each)}"


def _resolve(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


if __name__ == "__main__":
    sys.stdout.write(describe())
