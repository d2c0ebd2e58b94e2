"""The documentation names what exists: files, modules, make targets, headings and tests."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = {path.name for path in REPOSITORY.iterdir() if path.is_dir()}
PAGES = [
    path.relative_to(REPOSITORY).as_posix()
    for path in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"))
]
ACCEPTANCE = "docs/acceptance.md"


def text(page: str) -> str:
    return (REPOSITORY / page).read_text()


def without_code_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> Iterator[str]:
    """The anchors that GitHub makes of a page's headings."""
    for heading in re.findall(r"^#+ (.*)$", without_code_blocks(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / page).parent / path if path else REPOSITORY / page
        assert file.exists(), target
        if anchor:
            assert anchor in set(anchors(file.resolve().relative_to(REPOSITORY).as_posix())), target


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: str) -> None:
    names = re.findall(r"`([\w.-]+/[\w./*-]*)`", text(page))
    inside = [name for name in names if name.partition("/")[0] in FOLDERS]
    assert [name for name in inside if not list(REPOSITORY.glob(name.rstrip("/")))] == []


def test_every_page_is_reached_by_links_from_the_readme() -> None:
    reached, pending = set[Path](), [REPOSITORY / "README.md"]
    while pending:
        page = pending.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            targets = re.findall(r"\]\(([\w./-]+)", page.read_text())
            pending += [page.parent / target for target in targets]
    pages = {REPOSITORY / page for page in PAGES}
    assert pages - reached == set()


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    for module in re.findall(r"python -m ([\w.]+\w)", text(page)):
        if module.partition(".")[0] in FOLDERS:
            assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES)
def test_named_make_targets_exist(page: str) -> None:
    makefile = text("Makefile")
    for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text(page), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("service", ["drafter", "gateway", "verifier"])
def test_the_architecture_names_every_room(service: str) -> None:
    page, docstring = text("docs/architecture.md"), text(f"{service}/__init__.py")
    for file in (REPOSITORY / service).glob("*/__init__.py"):
        room = file.parent.name
        assert f"`{service}/{room}/`" in page
        assert re.search(rf"^(    |- `){room}/", docstring, re.MULTILINE), room


def test_a_kit_names_its_modules() -> None:
    for kit in ("servicekit", "servicekit/kernels"):
        names = set(re.findall(r"\w+", text(f"{kit}/__init__.py").split('"""')[1]))
        modules = {
            path.stem
            for path in (REPOSITORY / kit).glob("*")
            if path.is_dir() or path.suffix == ".py"
        }
        assert modules - {"__init__", "__pycache__"} <= names


def test_every_decision_is_listed() -> None:
    index = text("docs/decisions/README.md")
    for file in (REPOSITORY / "docs" / "decisions").glob("*.md"):
        [title] = re.findall(r"^# (.*)$", file.read_text(), re.MULTILINE)
        assert file.name == "README.md" or f"[{title}]({file.name})" in index


def test_acceptance_criteria_and_the_tests_that_hold_them_name_each_other() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| .* \| (.*?) \|$", text(ACCEPTANCE), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    holders: set[str] = set()
    for _, name, cell in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", cell)
        assert files, name
        for file in files:
            docstring = text(file).split('"""')[1]
            assert name in docstring, (file, name)
            assert ACCEPTANCE in docstring, file
        holders.update(files)
    for path in (REPOSITORY / "tests").glob("*/test_*.py"):
        file = path.relative_to(REPOSITORY).as_posix()
        assert file in holders or f"({ACCEPTANCE})" not in path.read_text(), file
