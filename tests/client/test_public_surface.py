"""What callers of `tandem.client` rely on must not change by accident."""

import difflib
from pathlib import Path

import tandem.client
from tests.client.public_surface import describe, exported, load_client

FROZEN = Path(__file__).with_name("public_surface.txt")


def test_the_public_surface_is_the_frozen_one() -> None:
    frozen, actual = FROZEN.read_text().splitlines(), describe().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, actual, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, "see tests/client/public_surface.py for how to make a change"


def test_every_exported_name_is_described() -> None:
    assert [member.name for member in exported(load_client())] == tandem.client.__all__
