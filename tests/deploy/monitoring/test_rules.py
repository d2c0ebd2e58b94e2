"""Recording rules and alerts use exported metrics, and behave as documented."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics
from tests.deploy.manifests import of_kind
from tests.deploy.monitoring.metric_names import check, exported
from tests.deploy.monitoring.rules import (
    PROMETHEUS,
    REPOSITORY,
    RULE_FILES,
    TEST_FILES,
    alert_cases,
    recorded,
    rules,
)

RULES = rules()
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RUNBOOKS = REPOSITORY / "docs" / "runbooks.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="no promtool on this machine; `make test-deploy` installs it, as root",
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_metric_and_label_of_a_rule_is_exported(rule: dict[str, Any]) -> None:
    check(rule["expr"], recorded())


def test_recorded_series_are_named_by_their_sources() -> None:
    names = exported()
    for name in recorded():
        level, metric, _ = name.split(":")
        assert level == "tandem"
        assert re.fullmatch(r"[a-z_]+", metric), name
        assert name not in names


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_summary_a_severity_and_a_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["for"]
    assert rule["annotations"]["summary"]
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert path == "docs/runbooks.md"
    headings = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert anchor == alert.lower()
    assert alert in headings


def test_every_runbook_has_its_alert() -> None:
    assert set(re.findall(r"^## (Tandem\w+)$", RUNBOOKS.read_text(), re.MULTILINE)) == set(ALERTS)


def test_the_runbook_of_shed_requests_has_every_reason_that_counts() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    reasons = {
        sample.labels["reason"]
        for metric in registry.collect()
        if metric.name == "tandem_requests_shed"
        for sample in metric.samples
    }
    section = RUNBOOKS.read_text().partition("## TandemRequestsShed\n")[2].partition("\n## ")[0]
    assert "concurrency" in reasons
    for reason in reasons:
        assert reason.startswith("tenant_") or f"`{reason}`: " in section, reason


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    cases = [case for case in alert_cases() if case["alertname"] == alert]
    fires = [bool(case.get("exp_alerts")) for case in cases]
    assert True in fires
    assert False in fires


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    run_promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    run_promtool("check", "rules", *map(str, RULE_FILES))


@needs_promtool
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_promtools_cases_pass(path: Any) -> None:
    run_promtool("test", "rules", str(path))


def run_promtool(*arguments: str) -> None:
    ran = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


# The example for a cluster without the Prometheus operator, in the first comment of prometheus.yml.


def cluster_job() -> dict[str, Any]:
    comment = (PROMETHEUS / "prometheus.yml").read_text().partition("\nglobal:")[0]
    example = comment[comment.index("#   - job_name") :]
    [job] = yaml.safe_load(re.sub("^#", "", example, flags=re.MULTILINE))
    return dict(job)


@needs_promtool
def test_promtool_accepts_the_example_for_a_cluster(tmp_path: Path) -> None:
    job = cluster_job()
    # Debian's Prometheus is built without it.
    del job["kubernetes_sd_configs"]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    run_promtool("check", "config", "--syntax-only", str(path))


# For the Prometheus operator.


def test_the_operator_gets_the_same_rules() -> None:
    [manifest] = of_kind("monitoring", "PrometheusRule")
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    assert manifest["spec"] == {"groups": groups}
    # In one file Prometheus refuses two groups of one name.
    assert len({group["name"] for group in groups}) == len(groups)
    assert manifest["metadata"]["labels"]["release"] == "prometheus"


def test_the_operator_scrapes_the_same_jobs() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert jobs == {"tandem-gateway", "tandem-drafter", "tandem-verifier"}
    named = set()
    for monitor in of_kind("monitoring", "ServiceMonitor"):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        component = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] == "metrics"
        [relabeling] = endpoint["relabelings"]
        assert relabeling == {"targetLabel": "job", "replacement": f"tandem-{component}"}
        named.add(relabeling["replacement"])
    assert named == jobs
