"""Makes `prometheus-rule.yaml`, for the Prometheus operator, of `deploy/prometheus`'s rule files.

python -m deploy.components.monitoring.generate          writes it
python -m deploy.components.monitoring.generate --check  fails, with the difference, if it is old
"""

import argparse
import difflib
import sys
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
RULE_FILES = [FOLDER.parents[1] / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
TARGET = FOLDER / "prometheus-rule.yaml"


def prometheus_rule() -> str:
    """The manifest: the groups of all rule files, in their order."""
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
    header = "# Made of deploy/prometheus/*.yml by generate.py: don't edit.\n"
    return header + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Indents lists as the other manifests do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes prometheus-rule.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it is old")
    wanted = prometheus_rule()
    if not parser.parse_args().check:
        TARGET.write_text(wanted)
        return 0
    found = TARGET.read_text() if TARGET.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(
            found.splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            fromfile=TARGET.name,
            tofile="generated",
        )
    )
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
