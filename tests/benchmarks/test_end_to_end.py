"""Every row of the benchmark, with short tasks on one stack; tests/repository runs it in full."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks import end_to_end
from benchmarks.client_load import run_tasks
from benchmarks.end_to_end import Row
from benchmarks.services import Stack, running_stack
from benchmarks.workloads import BUNDLED_MODEL, Task, random_tasks, rename_tasks
from tandem.client import AsyncTandemClient, SpeculationParams, Usage


@pytest.fixture(scope="module")
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
    written = json.loads(file.read_text())
    assert written["model"] == str(BUNDLED_MODEL)
    assert (written["prompts"], written["rounds"], written["dtype"]) == (1, 1, "bfloat16")
    figures = {(f["name"], f["streams"]): f for f in written["figures"]}
    assert figures["strict, speculation", 1]["num_accepted_tokens"] > 0
    assert figures["strict, plain", 1]["num_drafts"] == 0
    assert all(figure["median"] > 0 for figure in figures.values())


async def test_a_rows_hops_are_those_of_its_own_rounds(stack: Stack) -> None:
    tasks = rename_tasks(BUNDLED_MODEL, 4)
    num_hops: list[int] = []

    async def run(tasks: Sequence[Task]) -> tuple[int, Sequence[Usage]]:
        before, _ = await end_to_end._hops(row)
        result = await run_tasks(client, tasks, 2, SpeculationParams())
        after, _ = await end_to_end._hops(row)
        num_hops.append(after - before)
        return result

    metrics = stack.services["verifier"].metrics
    row = Row("speculation", 2, tasks, run, asks_all_before=True, hops_from=metrics)
    async with AsyncTandemClient(stack.gateway, retry=None) as client:
        [figure] = await end_to_end._measure([row], 1)
    warm_up, own = num_hops
    # A hint may come after the last token.
    assert 0 < own <= figure.num_hops < own + warm_up
    mean_ms = figure.hops_s / figure.num_hops * 1e3
    assert 0 < mean_ms < 1e3
    *_, line = end_to_end._table([figure], {}).splitlines()
    assert line == (
        "Hop that no step delayed, verifier to drafter and back (speculation, 2): "
        f"{mean_ms:.2f} ms (mean of {figure.num_hops})."
    )
