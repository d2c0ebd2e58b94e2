"""A later version's manifests can be applied over those of an earlier one."""

import difflib
import re
from pathlib import Path

import pytest

from tests.deploy.lasting_objects import describe
from tests.deploy.manifests import REPOSITORY, SERVICES, render, workloads_of

FROZEN = Path(__file__).with_name("lasting_objects.txt")


def test_no_object_is_renamed_left_behind_or_refused_but_on_purpose() -> None:
    frozen, actual = FROZEN.read_text().splitlines(), describe().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, actual, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, "see tests/deploy/lasting_objects.py for how to make a change"


@pytest.mark.parametrize("service", SERVICES)
def test_services_of_the_overlays_of_0_1_0_find_the_pods_of_a_release(service: str) -> None:
    """And the command that removes what they selected leaves the release alone."""
    page = (REPOSITORY / "docs" / "deploy.md").read_text()
    [release] = re.findall(
        r"^helm install (?!tandem)(\S+) deploy/chart -n tandem", page, re.MULTILINE
    )
    manifests = render({}, release=release)
    [workload] = [each for each in workloads_of(manifests) if each.service == service]
    old = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/component": service}
    assert old.items() <= workload.labels.items()
    # A workload of the same name could not get these labels into its selector.
    assert workload.name != f"tandem-{service}"
    assert "'app.kubernetes.io/part-of=tandem,!app.kubernetes.io/instance'" in page
    assert all("app.kubernetes.io/instance" in each["metadata"]["labels"] for each in manifests)
