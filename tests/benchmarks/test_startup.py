"""One start, from the repository itself."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import startup


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_start_is_measured_up_to_the_first_token(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    startup.main(["--quick", "--json", str(file)])
    first = json.loads(file.read_text())["first"]
    assert 0 < first["seconds"]["ready"] < first["seconds"]["first token"]
    assert first["usage"].keys() >= {"tandem up", "drafter", "verifier", "gateway"}
    assert all(0 < usage["pss_mb"] <= usage["rss_mb"] for usage in first["usage"].values())
