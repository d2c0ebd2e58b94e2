"""A round of each table, of small shapes."""

import json
from pathlib import Path

from benchmarks import decoder


def test_every_table_has_rows(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    decoder.main(["--quick", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert all(figures[name] for name in decoder.MEASURES)
