"""Stable contract (docs/acceptance.md): what clients compile against changes only on purpose."""

import difflib
from pathlib import Path

from tests.repository.wire_contract import describe

FROZEN = Path(__file__).with_name("wire_contract.txt")


def test_the_wire_contract_is_the_frozen_one() -> None:
    frozen, actual = FROZEN.read_text().splitlines(), describe().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, actual, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, "see tests/repository/wire_contract.py for how to make a change"
