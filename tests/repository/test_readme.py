"""Quick start (docs/acceptance.md): the README's commands, in their order, in this environment."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tandem.client
from tandem.local import local_tandem

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "demo_model" / "model"
MARKER = "<!-- tested by tests/repository/test_readme.py -->"


def commands() -> list[str]:
    """The lines of the code block after the marker."""
    readme = (REPOSITORY / "README.md").read_text()
    block = re.search(re.escape(MARKER) + r"\n```sh\n(.*?)```", readme, re.DOTALL)
    assert block is not None, f"no code block after {MARKER}"
    return block[1].strip().splitlines()


def run(command: str, *more: str, timeout_s: float = 110) -> str:
    """Runs a command of the README with this environment's programs; returns its stdout."""
    words = [*shlex.split(command), *more]
    if words[0] in ("pip", "pytest"):
        words = ["python", "-m", *words]
    assert words[0] == "python"
    ran = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=REPOSITORY,
        # The inner pytest must not inherit the outer one's settings.
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


def test_the_commands_are_those_tested_here() -> None:
    assert commands() == [
        "pip install -e '.[all]'",
        "pytest",
        "python examples/quickstart.py",
        "python -m benchmarks.end_to_end",
    ]


@pytest.mark.long  # `make` made this environment so
def test_all_requirements_resolve() -> None:
    run(commands()[0], "--dry-run", "--quiet", "-c", "constraints.txt")


@pytest.mark.long  # every run without a path collects all tests
def test_pytest_finds_every_test() -> None:
    listed = run(commands()[1], "--collect-only", "--quiet")
    for folder in ("drafter", "verifier", "gateway", "integration", "servicekit"):
        assert f"tests/{folder}/" in listed


def run_python(code: str, address: str) -> str:
    """Runs an example against a gateway; returns what it prints."""
    assert "127.0.0.1:50050" in code
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("127.0.0.1:50050", address), {})
    return printed.getvalue()


def test_the_first_requests_print_the_documented_output() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    command = re.search(r"```sh\n(tandem generate .*)\n```\n\n```\n(.*\n)```", readme)
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert command is not None
    assert example is not None
    # The docstring's first block: the blocking client, with its output in a comment.
    described = tandem.client.__doc__ or ""
    docstring = textwrap.dedent(described[: described.index("    async with")].partition("\n\n")[2])
    documented = re.search(r"this prints (.*)\.\n", docstring)
    assert documented is not None
    _, *words = shlex.split(command[1])
    with local_tandem(model=MODEL, quiet=True) as addresses:
        shown = run("python -m tandem", *words, "--target", addresses["grpc"])
        assert shown.strip() == command[2].strip()
        assert run_python(example[1], addresses["grpc"]).strip() == command[2].strip()
        code = "from tandem.client import GenerationRequest, TandemClient\n" + docstring
        assert run_python(code, addresses["grpc"]).strip() == documented[1]


@pytest.mark.timeout(400)
def test_the_quickstart_shows_every_step_and_a_summary() -> None:
    shown = run(commands()[2], "--model", str(MODEL), timeout_s=380)
    for word in ("drafted", "accepted", "appended", "mean acceptance length"):
        assert word in shown


@pytest.mark.long  # tests/benchmarks/test_end_to_end.py runs shorter tasks
@pytest.mark.timeout(600)
def test_the_benchmark_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--model", str(MODEL), "--prompts", "1", "--rounds", "1", "--json", str(file)]
    shown = run(commands()[3], *options, timeout_s=580)
    assert "| strict, speculation | 16 |" in shown
    assert "strict, speculation / transformers, prompt lookup" in shown
    assert "cached prompts / not cached, strict, speculation, 16" in shown
    figures = {(f["name"], f["streams"]): f for f in json.loads(file.read_text())["figures"]}
    assert figures["strict, speculation", 1]["num_accepted_tokens"] > 0
    assert figures["strict, plain", 1]["num_drafts"] == 0
    assert all(figure["median"] > 0 for figure in figures.values())
