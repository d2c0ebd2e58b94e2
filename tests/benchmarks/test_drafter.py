"""A few rounds of each table."""

import json
from pathlib import Path

from benchmarks import drafter


def test_every_table_has_rows(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    drafter.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert len(figures["proposals"]) == 2 * len(figures["texts"]) == 2 * len(drafter.POLICIES)
    assert all(row["proposal, best"] > 0 for row in figures["proposals"])
    assert all(row["p50, ms"] <= row["p99, ms"] for row in figures["stream"])
