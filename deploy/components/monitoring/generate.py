"""Generates `prometheus-rule.yaml`, for the Prometheus operator, from the rule files.

python -m deploy.components.monitoring.generate          writes it
python -m deploy.components.monitoring.generate --check  fails, with the difference, if out of date
"""

import sys
from pathlib import Path

import yaml

from deploy.generated_files import write_or_check

FOLDER = Path(__file__).resolve().parent
RULE_FILES = [FOLDER.parents[1] / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
TARGET = FOLDER / "prometheus-rule.yaml"


def prometheus_rule() -> str:
    """The manifest with the groups of all rule files, in order."""
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "tandem",
            "labels": {"app.kubernetes.io/name": "tandem"},
        },
        "spec": {"groups": groups},
    }
    header = "# Generated from deploy/prometheus/*.yml by generate.py: do not edit.\n"
    return header + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Indents lists like the other manifests."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def main() -> int:
    return write_or_check("Generates prometheus-rule.yaml.", {TARGET: prometheus_rule()})


if __name__ == "__main__":
    sys.exit(main())
