"""A grid that ends early goes on where it ended, and says which cells miss their goals."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speculation

QUICK = ("--dtypes", "float32", "--texts", "random", "--fixed", "0", "--rounds", "1")


def run(file: Path, *streams: int, seconds: str = "0") -> dict[str, Any]:
    speculation.main(
        [*QUICK, "--seconds", seconds, "--streams", *map(str, streams), "--json", str(file)]
    )
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_a_run_measures_the_cells_that_its_file_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    [first] = run(file, 1)["rows"]
    assert first["on_off"]["low"] > 0
    # What it finds, it believes.
    kept = json.loads(file.read_text())
    kept["rows"][0]["on_off"] = {"median": 0.5, "low": 0.4, "high": 0.6}
    file.write_text(json.dumps(kept))
    capsys.readouterr()
    both = run(file, 1, 2)["rows"]
    assert [row["streams"] for row in both] == [1, 2]
    printed = capsys.readouterr()
    assert "| random | 1 |" not in printed.err, "not measured again"
    assert "| random | 2 |" in printed.err
    assert "Misses its goal: float32, random, 1: on_off 0.500 < 0.98" in printed.out
    assert list(tmp_path.iterdir()) == [file]


def test_figures_of_other_settings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    file.write_text(json.dumps({"command": "python -m benchmarks.speculation", "threads": 7}))
    with pytest.raises(SystemExit):
        run(file, 1)
    assert "has threads 7, this run 1" in capsys.readouterr().err
    assert json.loads(file.read_text())["threads"] == 7


def test_the_best_of_a_round_is_chosen_by_other_rounds() -> None:
    """Of two equal numbers, one is lucky in each round: the luck must not count."""
    turns = speculation._Turns(
        num_rounds=4,
        contenders=[1, 3],
        tokens_per_s={
            "learned": [100.0] * 4,
            0: [100.0] * 4,
            1: [120.0, 80.0, 120.0, 80.0],
            3: [80.0, 120.0, 80.0, 120.0],
        },
    )
    of_best = turns.figures()["of_best"]
    assert of_best is not None
    assert of_best.median == 100 / 80


def test_a_cell_goes_on_until_its_intervals_exclude_the_goals() -> None:
    turns = speculation._Turns(
        num_rounds=6,
        contenders=[0],
        tokens_per_s={"learned": [99.0, 101.0] * 3, 0: [100.0] * 6},
    )
    assert turns.is_decided
    turns.tokens_per_s["learned"] = [90.0, 110.0] * 3
    assert not turns.is_decided
