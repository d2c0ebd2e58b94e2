"""Describes what a `helm upgrade` to a later version cannot take back, one line per object: its
kind and name, by which others find it, and the fields that Kubernetes does not let change.

`lasting_objects.txt` beside this file is the frozen description. After a deliberate change, which
docs/deploy.md tells operators of:

    python -m tests.deploy.lasting_objects > tests/deploy/lasting_objects.txt
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.deploy.manifests import VARIANTS, Manifest, resolve

_MUTABLE_OF_STATEFUL_SET = {
    "replicas",
    "template",
    "updateStrategy",
    "minReadySeconds",
    "revisionHistoryLimit",
    "ordinals",
    "persistentVolumeClaimRetentionPolicy",
}
_FIXED: dict[str, Callable[[Manifest], Any]] = {
    "Deployment": lambda manifest: manifest["spec"]["selector"]["matchLabels"],
    "StatefulSet": lambda manifest: {
        key: value for key, value in manifest["spec"].items() if key not in _MUTABLE_OF_STATEFUL_SET
    },
    "Service": lambda manifest: manifest["spec"].get("clusterIP", ""),
}


def describe() -> str:
    lines = {_line(manifest) for variant in VARIANTS for manifest in resolve(variant)}
    return "\n".join(sorted(lines)) + "\n"


def _line(manifest: Manifest) -> str:
    name = manifest["metadata"]["name"]
    fixed = _FIXED.get(manifest["kind"])
    contents = "" if fixed is None else f": {json.dumps(fixed(manifest), sort_keys=True)}"
    return f"{manifest['kind']} {name}{contents}"


if __name__ == "__main__":
    sys.stdout.write(describe())
