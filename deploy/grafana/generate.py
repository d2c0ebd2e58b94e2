"""Generates the dashboards' JSON.

python -m deploy.grafana.generate          writes it
python -m deploy.grafana.generate --check  fails, with the difference, if it is out of date
"""

import sys
from pathlib import Path

from deploy.generated_files import write_or_check
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import Dashboard, to_json
from deploy.grafana.speculation import SPECULATION

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, SPECULATION)
FOLDER = Path(__file__).resolve().parent / "dashboards"


def path_of(dashboard: Dashboard) -> Path:
    """The dashboard's file."""
    return FOLDER / f"{dashboard.uid.removeprefix('tandem-')}.json"


def main() -> int:
    files = {path_of(dashboard): to_json(dashboard) for dashboard in DASHBOARDS}
    return write_or_check("Generates the dashboards' JSON.", files)


if __name__ == "__main__":
    sys.exit(main())
