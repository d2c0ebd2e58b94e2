"""A cell of each text, with one round."""

import json
from pathlib import Path

from benchmarks import speculation


async def test_every_text_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    await speculation.main(["--quick", "--json", str(file)])
    measures = json.loads(file.read_text())["measures"]
    assert [each["row"] for each in measures] == [
        text for text in speculation.TEXTS for _ in ("of the best", "on / off")
    ]
    assert all(each["value"]["low"] > 0 for each in measures)
