"""The dashboards are up to date, and query only exported metrics."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from deploy.grafana.generate import DASHBOARDS, path_of
from deploy.grafana.panels import Panel
from tests.deploy.manifests import of_kind
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
            labels = recorded().get(metric.name) or exported().get(metric.name, frozenset())
            assert metric.labels >= {"namespace"}, metric
            # Some recorded series are of all instances.
            has_instance = "instance" in labels or metric.name not in recorded()
            assert ("instance" in metric.labels) == has_instance, metric
            assert ("model" in metric.labels) == ("model" in labels), metric


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
    shown = [panel for panel in page["panels"] if panel["type"] not in ("row", "text")]
    texts = [panel["options"]["content"] for panel in page["panels"] if panel["type"] == "text"]
    assert texts == [dashboard.introduction] * bool(dashboard.introduction)
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


@pytest.mark.parametrize("page", ["runbooks.md", "monitoring.md"])
def test_pages_point_at_panels_that_exist(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", text))
    titles = {panel.title for panel in PANELS} | {
        each.title.removeprefix("Tandem / ") for each in DASHBOARDS
    }
    assert len(named) > 5
    assert named - titles == set()


def test_every_dashboard_becomes_a_config_map() -> None:
    maps = list(of_kind("monitoring", "ConfigMap"))
    assert {m["metadata"]["labels"]["grafana_dashboard"] for m in maps} == {"1"}
    files = {name: text for m in maps for name, text in m["data"].items()}
    assert files.keys() == {path_of(one).name for one in DASHBOARDS}
    for one in DASHBOARDS:
        assert json.loads(files[path_of(one).name]) == json.loads(path_of(one).read_text())
