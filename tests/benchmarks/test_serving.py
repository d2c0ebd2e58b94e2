"""Every row with hardly any load on real services, and the report."""

import json
from pathlib import Path

import pytest

from benchmarks.ratios import Interval, median_interval, ratios
from benchmarks.report import Goal, Measure, measures_table
from benchmarks.serving import __main__ as command
from benchmarks.serving import load
from benchmarks.turns import Variant, by_turns


async def test_every_row_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "STREAMS", 1)
    monkeypatch.setattr(load, "FRACTIONS", (0.75, 1.0))
    file = tmp_path / "figures.json"
    await command.main(["--quick", "--streams", "1", "--json", str(file)])
    numbers = {"stack": 1, "http": 2, "random": 1, "load": 12, "replicas": 1, "drafters": 1}
    measures = json.loads(file.read_text())["measures"]
    assert [measure["row"] for measure in measures] == [
        row for row, number in numbers.items() for _ in range(number)
    ]
    for measure in measures:
        value = measure["value"]
        assert value["low"] <= value["median"] <= value["high"]
        assert value["median"] > 0 or "later" in measure["what"]
    printed = capsys.readouterr()
    assert "| stack: whole stack / engine in process, renames | 1 | float32 |" in printed.out
    assert printed.err.count("starts the services, verifiers: 1, drafters: 1\n") == 1


async def test_each_second_round_runs_in_the_opposite_order() -> None:
    ran: list[str] = []

    def variant(name: str) -> Variant:
        async def turn() -> float:
            ran.append(name)
            return float(len(ran))

        return Variant(name=name, streams=1, turn=turn)

    variants = [variant("a"), variant("b")]
    await by_turns(variants, 9, lambda: len(variants[0].figures) == 3)
    assert "".join(ran) == "ab" + "ab" + "ba" + "ab"
    # The warm-up's are not kept.
    assert [each.figures for each in variants] == [[3, 6, 7], [4, 5, 8]]


def test_ratios_are_those_of_each_round() -> None:
    assert ratios([2, 9, 8], [1, 3, 2]) == [2, 3, 4]
    found = median_interval([2.0, 3.0, 4.0])
    assert (found.low, found.median, found.high) == (2, 3, 4)


@pytest.mark.parametrize(
    ("median", "goal", "shown"),
    [
        (1.7, Goal(value=1.6, is_most=True), "**1.7** | 1.6 to 1.8 | ≤ 1.6"),
        (1.5, Goal(value=1.6, is_most=True), "1.5 | 1.4 to 1.6 | ≤ 1.6"),
        (0.9, Goal(value=0.98), "**0.9** | 0.8 to 1 | ≥ 0.98"),
        (0.99, Goal(value=0.98), "0.99 | 0.89 to 1.09 | ≥ 0.98"),
        (0.5, None, "0.5 | 0.4 to 0.6 | "),
    ],
)
def test_the_table_shows_what_misses_its_goal(median: float, goal: Goal | None, shown: str) -> None:
    value = Interval(median=median, low=median - 0.1, high=median + 0.1)
    measure = Measure(row="http", what="x", streams=1, dtype="float32", value=value, goal=goal)
    assert f"| http: x | 1 | float32 | {shown} |" in measures_table([measure])
