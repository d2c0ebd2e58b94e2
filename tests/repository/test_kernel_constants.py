"""What kernels are made of lies in files whose change compiles them anew.

Machine code with an old constant beside Python code with the new one writes past buffers. The files
are read here as `servicekit.kernels.jit` stamps them; nothing is compiled.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from servicekit.kernels.jit import stamped_sources

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("drafter", "gateway", "servicekit", "verifier")


def names_in(*nodes: ast.AST | None) -> set[str]:
    return {
        each.id
        for node in nodes
        if node is not None
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
    }


def used_by_kernels(module: ast.Module) -> set[str]:
    """The names that a module's kernels and intrinsics use, and what these are made of there; also
    what its constants are made of, which kernels elsewhere may use. Annotations are no part of
    machine code.
    """
    parts: dict[str, set[str]] = {}
    found, new = set[str](), set[str]()
    for statement in module.body:
        match statement:
            case ast.FunctionDef(name=name, body=body, decorator_list=decorators):
                parts[name] = names_in(*body, *decorators)
                if parts[name] & {"kernel", "intrinsic"}:
                    new.add(name)
            case ast.Assign(value=value) | ast.AnnAssign(value=value):
                # A logger is no constant.
                new |= names_in(value) - {"get_logger"}
    while new:
        found |= new
        new = set[str]().union(*(parts.get(name, set()) for name in new)) - found
    return found


def imported(module: ast.Module, root: Path) -> Iterator[tuple[str, Path]]:
    """The names that a module imports from the repository, and the files that define them."""
    for statement in module.body:
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        place = root.joinpath(*statement.module.split("."))
        for alias in statement.names:
            for file in (
                place / f"{alias.name}.py",
                place.with_suffix(".py"),
                place / "__init__.py",
            ):
                if file.exists():
                    yield alias.asname or alias.name, file
                    break


def not_stamped(root: Path, package: str) -> list[str]:
    stamped = stamped_sources(root / package)
    return [
        f"{path.relative_to(root)}: {name} of {file.relative_to(root)}"
        for path, source in stamped.items()
        if path.is_relative_to(root / package)
        for module in [ast.parse(source)]
        for used in [used_by_kernels(module)]
        for name, file in imported(module, root)
        if name in used and file not in stamped
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_kernels_are_made_of_stamped_files_only(package: str) -> None:
    assert not_stamped(REPOSITORY, package) == []
