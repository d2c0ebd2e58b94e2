"""A later version's manifests can be applied over those of an earlier one."""

import difflib
from pathlib import Path

from tests.deploy.lasting_objects import describe

FROZEN = Path(__file__).with_name("lasting_objects.txt")


def test_no_object_is_renamed_left_behind_or_refused_but_on_purpose() -> None:
    frozen, actual = FROZEN.read_text().splitlines(), describe().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, actual, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, "see tests/deploy/lasting_objects.py for how to make a change"
