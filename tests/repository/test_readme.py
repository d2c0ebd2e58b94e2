"""Quick start (docs/acceptance.md): the README's commands, in their order, in this environment.

The requests that it shows are run by test_commands.py, as those of all pages.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
        # The inner pytest must not inherit the outer settings. Every draft is verified, however
        # busy the machine is.
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | {"TANDEM_GATEWAY_DRAFT_WAIT": "always"},
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


def test_continuous_integration_runs_the_readmes_tests() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "not executable"
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert "\nmake test " in (REPOSITORY / "README.md").read_text()


@pytest.mark.long  # `make` made this environment so
def test_all_requirements_resolve() -> None:
    run(commands()[0], "--dry-run", "--quiet", "-c", "constraints.txt")


@pytest.mark.long  # every run without a path collects all tests
def test_pytest_finds_every_test() -> None:
    listed = run(commands()[1], "--collect-only", "--quiet")
    for folder in ("drafter", "verifier", "gateway", "integration", "servicekit"):
        assert f"tests/{folder}/" in listed


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
