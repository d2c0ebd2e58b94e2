"""Every row of the benchmark, with short tasks on one stack; tests/repository runs it in full."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import end_to_end
from benchmarks.services import Stack, running_stack
from benchmarks.workloads import BUNDLED_MODEL, Task, random_tasks, rename_tasks


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack(model=BUNDLED_MODEL, verifier_flags=["--threads", "1"]) as running:
        yield running


def shortened(tasks: list[Task]) -> list[Task]:
    return [dataclasses.replace(task, max_new_tokens=24) for task in tasks]


async def test_it_prints_a_table_and_writes_json(
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["", "--prompts", "1", "--rounds", "1", "--json", str(file)])
    monkeypatch.setattr(end_to_end, "running_stack", lambda **_: contextlib.nullcontext(stack))
    for source in (rename_tasks, random_tasks):
        monkeypatch.setattr(
            end_to_end,
            source.__name__,
            lambda *given, source=source, **named: shortened(source(*given, **named)),
        )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    await end_to_end.main()
    printed = capsys.readouterr()
    assert "| strict, speculation | 16 |" in printed.out
    # One line, of which nothing is left.
    shown = printed.err.split("\r\x1b[K")
    assert shown[1] == "warm-up: strict, speculation, 1 streams"
    assert any(line.startswith("3 of 2") for line in shown)
    assert shown[-1] == ""
    figures = {(f["name"], f["streams"]): f for f in json.loads(file.read_text())["figures"]}
    assert figures["strict, speculation", 1]["num_accepted_tokens"] > 0
    assert figures["strict, plain", 1]["num_drafts"] == 0
    assert all(figure["median"] > 0 for figure in figures.values())
