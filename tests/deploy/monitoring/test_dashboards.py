"""The dashboards are up to date, and query only exported metrics."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import DASHBOARDS, path_of
from deploy.grafana.panels import Panel
from tests.deploy.monitoring.metric_names import check, exported, selected
from tests.deploy.monitoring.rules import REPOSITORY, recorded

PANELS = [panel for dashboard in DASHBOARDS for panel in dashboard.panels()]


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.grafana.generate", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_committed_json_is_up_to_date() -> None:
    made = generate("--check")
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_metric_and_label_of_a_panel_is_exported(panel: Panel) -> None:
    for query in panel.queries:
        check(query.expression, recorded())
        for metric in selected(query.expression):
            has_model = "model" in exported().get(metric.name, ())
            assert metric.labels >= {"namespace"}, metric
            # Recorded series are of all instances.
            assert ("instance" in metric.labels) == (metric.name not in recorded()), metric
            assert ("model" in metric.labels) == has_model, metric


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_grafana_gets_every_panel_with_its_queries_in_the_chosen_prometheus(dashboard: Any) -> None:
    page = json.loads(path_of(dashboard).read_text())
    assert page["uid"] == dashboard.uid
    assert {one["name"] for one in page["templating"]["list"]} == {
        "datasource",
        "namespace",
        "instance",
        "model",
    }
    shown = [panel for panel in page["panels"] if panel["type"] != "row"]
    assert [panel["title"] for panel in shown] == [panel.title for panel in dashboard.panels()]
    for panel, source in zip(shown, dashboard.panels(), strict=True):
        assert panel["description"] == source.description
        assert [target["expr"] for target in panel["targets"]] == [
            query.expression for query in source.queries
        ]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_no_panel_covers_another(dashboard: Any) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path_of(dashboard).read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_every_dashboard_becomes_a_config_map() -> None:
    folder = REPOSITORY / "deploy" / "grafana"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    files = [file for maker in kustomization["configMapGenerator"] for file in maker["files"]]
    assert {folder / file for file in files} == {path_of(one) for one in DASHBOARDS}
    assert kustomization["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
