"""Every row of the benchmark, with short tasks; tests/repository runs it in full."""

import json
from pathlib import Path

import pytest

from benchmarks import end_to_end


async def test_it_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    await end_to_end.main(["--quick", "--json", str(file)])
    assert "| strict, speculation | 16 |" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert (written["prompts"], written["rounds"], written["dtype"]) == (1, 1, "bfloat16")
    figures = {(f["name"], f["streams"]): f for f in written["figures"]}
    assert figures["strict, plain", 1]["num_drafts"] == 0
    assert all(figure["median"] > 0 for figure in figures.values())
