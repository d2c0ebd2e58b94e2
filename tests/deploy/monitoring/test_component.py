"""The kustomize component resolves to manifests that are valid for the operator and Grafana."""

import copy
import json
import os
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import find_tool
from tests.deploy.monitoring.operator_schemas import SCHEMAS
from tests.deploy.monitoring.rules import REPOSITORY

COMPONENT = REPOSITORY / "deploy" / "components" / "monitoring"
DASHBOARDS = REPOSITORY / "deploy" / "grafana" / "dashboards"
# A ConfigMap holds at most 1 MiB.
MAX_CONFIG_MAP_BYTES = 1 << 20


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    kubectl = find_tool("kubectl")
    folder = tmp_path_factory.mktemp("overlay")
    overlay = {"namespace": "tandem", "components": [os.path.relpath(COMPONENT, folder)]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made = subprocess.run(
        [kubectl, "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def test_it_holds_monitors_rules_and_dashboards_in_the_overlays_namespace(
    manifests: list[dict[str, Any]],
) -> None:
    kinds = [manifest["kind"] for manifest in manifests]
    assert sorted(kinds) == [*["ConfigMap"] * 3, "PrometheusRule", *["ServiceMonitor"] * 3]
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"tandem"}


def test_the_operators_kinds_are_valid(manifests: list[dict[str, Any]]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checked = 0
    for kind, schema in SCHEMAS.items():
        for manifest in of_kind(manifests, kind):
            jsonschema.validate(manifest, schema)
            checked += 1
    assert checked == 4
    [rule] = of_kind(manifests, "PrometheusRule")
    wrong = copy.deepcopy(rule)
    wrong["spec"]["groups"][0]["rules"][0]["expression"] = "up"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMAS["PrometheusRule"])


def test_kustomize_does_not_change_the_rules(manifests: list[dict[str, Any]]) -> None:
    [rule] = of_kind(manifests, "PrometheusRule")
    committed = yaml.safe_load((COMPONENT / "prometheus-rule.yaml").read_text())
    assert rule["spec"] == committed["spec"]


def test_every_dashboard_has_the_sidecars_label(manifests: list[dict[str, Any]]) -> None:
    found = {}
    for config_map in of_kind(manifests, "ConfigMap"):
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert sum(map(len, config_map["data"].values())) < MAX_CONFIG_MAP_BYTES
        found.update(config_map["data"])
    assert found.keys() == {path.name for path in DASHBOARDS.iterdir()}
    for name, text in found.items():
        assert json.loads(text) == json.loads((DASHBOARDS / name).read_text())
