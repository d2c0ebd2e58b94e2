"""Generates the dashboards' JSON.

python -m deploy.grafana.generate          writes it
python -m deploy.grafana.generate --check  fails, with the difference, if it is out of date
"""

import argparse
import difflib
import sys
from pathlib import Path

from deploy.grafana.capacity import CAPACITY
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import Dashboard, to_json
from deploy.grafana.speculation import SPECULATION

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, SPECULATION, CAPACITY)
FOLDER = Path(__file__).resolve().parent / "dashboards"


def path_of(dashboard: Dashboard) -> Path:
    """The dashboard's file."""
    return FOLDER / f"{dashboard.uid.removeprefix('tandem-')}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Generates the dashboards' JSON.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    is_check = parser.parse_args().check
    is_outdated = False
    for dashboard in DASHBOARDS:
        path, wanted = path_of(dashboard), to_json(dashboard)
        if not is_check:
            path.write_text(wanted)
            continue
        found = path.read_text() if path.exists() else ""
        is_outdated |= found != wanted
        sys.stdout.writelines(
            difflib.unified_diff(
                found.splitlines(keepends=True),
                wanted.splitlines(keepends=True),
                fromfile=path.name,
                tofile="generated",
            )
        )
    return int(is_outdated)


if __name__ == "__main__":
    sys.exit(main())
